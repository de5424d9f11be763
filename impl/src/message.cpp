#include "message.h"

#include <fmt/format.h>

#include <cstring>
#include <type_traits>

#include "fsdp/errors.h"

namespace fsdp::processes {
namespace {

using in_process::Call;
using in_process::Failure;
using in_process::Operation;
using in_process::Slots;
using in_process::Transfer;

// Ranks are processes of one program on machines of one kind, so numbers travel as they lie in
// memory.
enum class Kind : std::uint8_t { kCall = 1, kBreach = 2, kStuck = 3 };

class Writer {
 public:
  template <typename T>
  void put(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto* begin = reinterpret_cast<const std::uint8_t*>(&value);
    bytes_.insert(bytes_.end(), begin, begin + sizeof(T));
  }
  void put_text(const std::string& text) {
    put<std::uint64_t>(text.size());
    bytes_.insert(bytes_.end(), text.begin(), text.end());
  }
  void put_rest(const Bytes& rest) { bytes_.insert(bytes_.end(), rest.begin(), rest.end()); }
  Bytes take() { return std::move(bytes_); }

 private:
  Bytes bytes_;
};

class Reader {
 public:
  Reader(const Bytes& bytes, int sender) : bytes_(bytes), sender_(sender) {}

  template <typename T>
  T get() {
    T value;
    std::memcpy(&value, advance(sizeof(T)), sizeof(T));
    return value;
  }
  std::string get_text() {
    const auto size = get<std::uint64_t>();
    const auto* begin = reinterpret_cast<const char*>(advance(size));
    return {begin, begin + size};
  }
  Bytes get_rest() {
    const auto* begin = advance(bytes_.size() - at_);
    return {begin, bytes_.data() + bytes_.size()};
  }

 private:
  const std::uint8_t* advance(std::uint64_t size) {
    if (size > bytes_.size() - at_) {
      throw Error(
          fmt::format("a message from rank {} ends after {} bytes, in the middle; do all "
                      "ranks run the same version of the program?",
                      sender_, bytes_.size()));
    }
    const auto* begin = bytes_.data() + at_;
    at_ += size;
    return begin;
  }

  const Bytes& bytes_;
  int sender_;
  std::uint64_t at_ = 0;
};

void put_sizes(Writer& writer, const Slots& slots) {
  writer.put<std::int32_t>(slots.size());
  for (int slot = 0; slot < slots.size(); ++slot) {
    writer.put(slots[slot].numel);
  }
}

// Slots that have sizes, but no memory here.
Slots get_sizes(Reader& reader) {
  std::vector<std::int64_t> sizes(reader.get<std::int32_t>());
  for (auto& size : sizes) {
    size = reader.get<std::int64_t>();
  }
  return Slots::split(at::Tensor(), sizes);
}

void put_call(Writer& writer, const Call& call) {
  const auto device = call.device();
  writer.put(call.rank);
  writer.put(call.operation);
  writer.put(call.reduction);
  writer.put(call.root);
  writer.put(call.tag);
  writer.put(device.type());
  writer.put(device.index());
  writer.put_text(call.label);
  writer.put<std::uint32_t>(call.transfers.size());
  for (const auto& transfer : call.transfers) {
    writer.put(transfer.dtype);
    writer.put(transfer.numel);
    if (transfer.numel < 0) {  // an all-to-all, whose sizes are agreed on in pairs
      put_sizes(writer, transfer.from);
      put_sizes(writer, transfer.to);
    }
  }
}

Call get_call(Reader& reader) {
  Call call;
  call.rank = reader.get<int>();
  call.operation = reader.get<Operation>();
  call.reduction = reader.get<c10d::ReduceOp::RedOpType>();
  call.root = reader.get<int>();
  call.tag = reader.get<int>();
  const auto device_type = reader.get<c10::DeviceType>();
  call.stated_device = at::Device(device_type, reader.get<c10::DeviceIndex>());
  call.label = reader.get_text();
  const auto count = reader.get<std::uint32_t>();
  for (std::uint32_t i = 0; i < count; ++i) {
    Transfer transfer;
    transfer.dtype = reader.get<c10::ScalarType>();
    transfer.numel = reader.get<std::int64_t>();
    if (transfer.numel < 0) {
      transfer.from = get_sizes(reader);
      transfer.to = get_sizes(reader);
    }
    call.transfers.push_back(std::move(transfer));
  }
  return call;
}

}  // namespace

Bytes encode(const CallMessage& message) {
  Writer writer;
  writer.put(Kind::kCall);
  writer.put(message.group);
  writer.put(message.number);
  put_call(writer, message.call);
  writer.put_rest(message.payload);
  return writer.take();
}

Bytes encode(const BreachMessage& message) {
  Writer writer;
  writer.put(Kind::kBreach);
  writer.put(message.group);
  writer.put(message.from_sequence);
  writer.put(message.rank);
  writer.put(message.kind);
  writer.put_text(message.text);
  return writer.take();
}

Bytes encode(const StuckMessage& message) {
  Writer writer;
  writer.put(Kind::kStuck);
  writer.put(message.group);
  writer.put(message.number);
  writer.put(message.rank);
  writer.put(message.is_answer);
  writer.put<std::uint32_t>(message.awaited.size());
  for (const int rank : message.awaited) {
    writer.put(rank);
  }
  return writer.take();
}

Message decode(const Bytes& bytes, int sender) {
  Reader reader(bytes, sender);
  const auto kind = reader.get<Kind>();
  if (kind == Kind::kCall) {
    CallMessage message;
    message.group = reader.get<std::uint64_t>();
    message.number = reader.get<std::uint64_t>();
    message.call = get_call(reader);
    message.payload = reader.get_rest();
    return message;
  }
  if (kind == Kind::kBreach) {
    BreachMessage message;
    message.group = reader.get<std::uint64_t>();
    message.from_sequence = reader.get<std::uint64_t>();
    message.rank = reader.get<int>();
    message.kind = reader.get<Failure::Kind>();
    message.text = reader.get_text();
    return message;
  }
  if (kind == Kind::kStuck) {
    StuckMessage message;
    message.group = reader.get<std::uint64_t>();
    message.number = reader.get<std::uint64_t>();
    message.rank = reader.get<int>();
    message.is_answer = reader.get<bool>();
    const auto count = reader.get<std::uint32_t>();
    for (std::uint32_t i = 0; i < count; ++i) {
      message.awaited.push_back(reader.get<int>());
    }
    return message;
  }
  throw Error(
      fmt::format("a message from rank {} is of kind {}, which does not exist; do all ranks "
                  "run the same version of the program?",
                  sender, static_cast<int>(kind)));
}

std::uint64_t group_of(const Message& message) {
  return std::visit([](const auto& each) { return each.group; }, message);
}

}  // namespace fsdp::processes
