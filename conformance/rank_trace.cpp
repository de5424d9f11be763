#include "conformance/rank_trace.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "conformance/trace_io.h"

namespace shardproof {
namespace {

using nlohmann::json;

// The bytes: the length of the description (8 bytes), the description (JSON), then each tensor's
// values in the same order.

json description_of(const RankTrace& trace) {
  auto tensors = json::array();
  for (const auto& tensor : trace.tensors) {
    const auto& piece = tensor.pieces.front();
    tensors.push_back({to_string(tensor.quantity), tensor.name, tensor.shape,
                       static_cast<int>(tensor.placement), piece.rank, piece.offset,
                       static_cast<int>(piece.values.scalar_type()), piece.values.sizes().vec()});
  }
  auto strikes = json::array();
  for (const auto& strike : trace.strikes) {
    strikes.push_back(
        {strike.step, strike.rank, to_string(strike.quantity), strike.name, strike.element});
  }
  return {{"tensors", std::move(tensors)}, {"strikes", std::move(strikes)}};
}

/// Takes bytes from the front of a text.
class Reader {
 public:
  explicit Reader(std::string_view rest) : rest_(rest) {}
  std::string_view take(std::size_t size) {
    if (size > rest_.size()) {
      throw TraceError(fmt::format("a rank's trace ends {} bytes early; wanted: what pack() made",
                                   size - rest_.size()));
    }
    const auto taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }

 private:
  std::string_view rest_;
};

std::string describe(const TraceTensor& tensor) {
  return fmt::format("{} '{}' of sizes {}, {}", to_string(tensor.quantity), tensor.name,
                     c10::str(at::IntArrayRef(tensor.shape)), to_string(tensor.placement));
}

void check_alike(int step, const RankTrace& first, const RankTrace& other, std::size_t rank) {
  const auto count = std::max(first.tensors.size(), other.tensors.size());
  for (std::size_t i = 0; i < count; ++i) {
    const auto name = [i](const RankTrace& trace) {
      return i < trace.tensors.size() ? describe(trace.tensors[i]) : std::string("nothing");
    };
    if (name(first) != name(other)) {
      throw TraceError(
          fmt::format("rank {}: in step {} its tensor number {} is {}, and rank 0's is {}; wanted: "
                      "the same on every rank. Does every rank run the same model?",
                      rank, step, i, name(other), name(first)));
    }
  }
}

}  // namespace

std::string pack(const RankTrace& trace) {
  const auto description = description_of(trace).dump();
  const auto length = static_cast<std::uint64_t>(description.size());
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  bytes += description;
  for (const auto& tensor : trace.tensors) {
    const auto& values = tensor.pieces.front().values;
    bytes.append(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
  }
  return bytes;
}

RankTrace unpack(const std::string& bytes) {
  Reader reader(bytes);
  std::uint64_t length = 0;
  std::memcpy(&length, reader.take(sizeof(length)).data(), sizeof(length));
  const auto description = json::parse(reader.take(length));
  RankTrace trace;
  for (const auto& entry : description["tensors"]) {
    TraceTensor tensor;
    tensor.quantity = quantity_from_string(entry[0].get<std::string>());
    tensor.name = entry[1];
    tensor.shape = entry[2].get<std::vector<std::int64_t>>();
    tensor.placement = static_cast<Placement>(entry[3].get<int>());
    Piece piece;
    piece.rank = entry[4];
    piece.offset = entry[5];
    piece.values = at::empty(entry[7].get<std::vector<std::int64_t>>(),
                             static_cast<at::ScalarType>(entry[6].get<int>()));
    const auto values = reader.take(piece.values.nbytes());
    if (!values.empty()) {
      std::memcpy(piece.values.data_ptr(), values.data(), values.size());
    }
    tensor.pieces.push_back(std::move(piece));
    trace.tensors.push_back(std::move(tensor));
  }
  for (const auto& entry : description["strikes"]) {
    trace.strikes.push_back({entry[0], entry[1], quantity_from_string(entry[2].get<std::string>()),
                             entry[3], entry[4]});
  }
  return trace;
}

StepTrace join(int step, std::vector<RankTrace> ranks) {
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    check_alike(step, ranks.front(), ranks[rank], rank);
  }
  StepTrace trace;
  trace.step = step;
  trace.tensors = std::move(ranks.front().tensors);
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    for (std::size_t i = 0; i < trace.tensors.size(); ++i) {
      trace.tensors[i].pieces.push_back(std::move(ranks[rank].tensors[i].pieces.front()));
    }
  }
  return trace;
}

}  // namespace shardproof
