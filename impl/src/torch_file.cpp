// Files as torch.save writes them: a zip archive with a pickle, which names the tensors, and a
// record of bytes for each storage. Writing uses libtorch's pickler. Reading does not use its
// unpickler, which takes neither an OrderedDict nor an attribute, and so no state_dict(); what is
// here knows the few instructions that torch.save uses for tensors and calls nothing.

#include <ATen/ATen.h>
#include <caffe2/serialize/inline_container.h>
#include <fmt/format.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <array>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <variant>

#include "fsdp/errors.h"
#include "fsdp/safetensors.h"
#include "fsdp/state.h"

namespace fsdp {
namespace {

namespace fs = std::filesystem;

struct Value;
using Values = std::vector<Value>;
using Members = std::vector<std::pair<Value, Value>>;
struct None {};
struct Mark {};
struct Global {
  std::string name;  // "module name"
};
struct Storage {
  at::Tensor elements;  // 1-D
};
/// A Python object. Tuples and lists are Values, dictionaries Members; both are shared, because the
/// pickle fills them in after it put them aside.
struct Value : std::variant<None, Mark, bool, std::int64_t, std::string, Global, Storage,
                            at::Tensor, std::shared_ptr<Values>, std::shared_ptr<Members>> {
  using variant::variant;
};

struct StorageType {
  std::string_view global;
  at::ScalarType dtype;
};
constexpr std::array kStorageTypes = {
    StorageType{"torch DoubleStorage", at::kDouble},
    StorageType{"torch FloatStorage", at::kFloat},
    StorageType{"torch HalfStorage", at::kHalf},
    StorageType{"torch BFloat16Storage", at::kBFloat16},
    StorageType{"torch LongStorage", at::kLong},
    StorageType{"torch IntStorage", at::kInt},
    StorageType{"torch ShortStorage", at::kShort},
    StorageType{"torch CharStorage", at::kChar},
    StorageType{"torch ByteStorage", at::kByte},
    StorageType{"torch BoolStorage", at::kBool},
};

/// Runs the pickle of one file.
class Unpickler {
 public:
  Unpickler(const fs::path& path, caffe2::serialize::PyTorchStreamReader& archive)
      : path_(path), archive_(archive) {
    auto [data, size] = archive.getRecord("data.pkl");
    pickle_.assign(static_cast<const char*>(data.get()), size);
  }

  Value run() {
    while (!step()) {
    }
    if (stack_.size() != 1) {
      fail(fmt::format("ends with {} values; wanted: one", stack_.size()));
    }
    return std::move(stack_.back());
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw FileError(fmt::format("{}: data.pkl: byte {}: {}", path_.string(), position_, what));
  }

 private:
  /// One instruction (https://docs.python.org/3/library/pickletools.html). True at the end.
  bool step() {
    const char instruction = bytes(1)[0];
    switch (instruction) {
      case '\x80':  // PROTO
        bytes(1);
        break;
      case '.':
        return true;
      case '(':
        stack_.emplace_back(Mark{});
        break;
      case 'N':
        stack_.emplace_back(None{});
        break;
      case '\x88':
      case '\x89':
        stack_.emplace_back(instruction == '\x88');
        break;
      case 'K':
        stack_.emplace_back(integer<std::uint8_t>());
        break;
      case 'M':
        stack_.emplace_back(integer<std::uint16_t>());
        break;
      case 'J':
        stack_.emplace_back(integer<std::int32_t>());
        break;
      case '\x8a':
        stack_.emplace_back(long_integer());
        break;
      case 'X':
        stack_.emplace_back(std::string(bytes(integer<std::uint32_t>())));
        break;
      case 'c':
        push_global();
        break;
      case ')':
      case ']':
        stack_.emplace_back(std::make_shared<Values>());
        break;
      case '}':
        stack_.emplace_back(std::make_shared<Members>());
        break;
      case '\x85':
      case '\x86':
      case '\x87':
        push_tuple(static_cast<std::size_t>(instruction - '\x84'));
        break;
      case 't':
        stack_.emplace_back(std::make_shared<Values>(take_to_mark()));
        break;
      case 'q':
        memo_[integer<std::uint8_t>()] = top();
        break;
      case 'r':
        memo_[integer<std::uint32_t>()] = top();
        break;
      case 'h':
        recall(integer<std::uint8_t>());
        break;
      case 'j':
        recall(integer<std::uint32_t>());
        break;
      case 's':
        set_one_item();
        break;
      case 'u':
        set_items(take_to_mark());
        break;
      case 'Q':
        stack_.emplace_back(load_storage(take<std::shared_ptr<Values>>("a storage's description")));
        break;
      case 'R':
        reduce();
        break;
      case 'b':  // an attribute, such as a state dictionary's _metadata
        pop();
        break;
      default:
        fail(
            fmt::format("instruction {:#04x}; wanted: those that torch.save uses for a dictionary "
                        "of tensors. Save dict(model.state_dict()) alone",
                        static_cast<unsigned char>(instruction)));
    }
    return false;
  }

  std::string_view bytes(std::size_t count) {
    if (count > pickle_.size() - position_) {
      fail("truncated");
    }
    position_ += count;
    return std::string_view(pickle_).substr(position_ - count, count);
  }
  template <typename T>
  std::int64_t integer() {
    T value{};
    std::memcpy(&value, bytes(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::int64_t long_integer() {
    const auto count = static_cast<std::size_t>(integer<std::uint8_t>());
    if (count > sizeof(std::int64_t)) {
      fail(fmt::format("an integer of {} bytes; wanted: at most 8", count));
    }
    const auto digits = bytes(count);
    const bool negative = count > 0 && (static_cast<unsigned char>(digits.back()) & 0x80) != 0;
    std::int64_t value = negative ? -1 : 0;
    std::memcpy(&value, digits.data(), count);
    return value;
  }
  std::string line() {
    const auto end = pickle_.find('\n', position_);
    if (end == std::string::npos) {
      fail("truncated");
    }
    const std::string text(bytes(end - position_));
    bytes(1);
    return text;
  }
  void push_global() {
    auto module = line();
    stack_.emplace_back(Global{module + " " + line()});
  }

  Value& top() {
    if (stack_.empty()) {
      fail("nothing to take");
    }
    return stack_.back();
  }
  Value pop() {
    auto value = std::move(top());
    stack_.pop_back();
    return value;
  }
  template <typename T>
  T take(std::string_view wanted) {
    auto value = pop();
    return get<T>(value, wanted);
  }
  template <typename T>
  T& get(Value& value, std::string_view wanted) const {
    auto* found = std::get_if<T>(&value);
    if (found == nullptr) {
      fail(fmt::format("something else where {} was expected", wanted));
    }
    return *found;
  }
  Values take_to_mark() {
    auto first = stack_.size();
    while (first > 0 && !std::holds_alternative<Mark>(stack_[first - 1])) {
      --first;
    }
    if (first == 0) {
      fail("no mark");
    }
    Values taken(std::make_move_iterator(stack_.begin() + static_cast<std::ptrdiff_t>(first)),
                 std::make_move_iterator(stack_.end()));
    stack_.resize(first - 1);
    return taken;
  }
  void push_tuple(std::size_t count) {
    if (stack_.size() < count) {
      fail("nothing to take");
    }
    Values items(stack_.end() - static_cast<std::ptrdiff_t>(count), stack_.end());
    stack_.resize(stack_.size() - count);
    stack_.emplace_back(std::make_shared<Values>(std::move(items)));
  }
  void recall(std::int64_t number) {
    const auto found = memo_.find(number);
    if (found == memo_.end()) {
      fail(fmt::format("nothing was put aside as {}", number));
    }
    stack_.push_back(found->second);
  }
  void set_one_item() {
    Values item(2);
    item[1] = pop();
    item[0] = pop();
    set_items(std::move(item));
  }
  void set_items(Values items) {
    auto& members = *get<std::shared_ptr<Members>>(top(), "a dictionary");
    if (items.size() % 2 != 0) {
      fail("a key without a value");
    }
    for (std::size_t i = 0; i < items.size(); i += 2) {
      members.emplace_back(std::move(items[i]), std::move(items[i + 1]));
    }
  }

  /// ("storage", type, key, device, number of elements)
  Storage load_storage(const std::shared_ptr<Values>& description) {
    auto& parts = *description;
    if (parts.size() != 5) {
      fail("a storage that is not described by five values");
    }
    const auto& type = get<Global>(parts[1], "a type of storage").name;
    const auto& key = get<std::string>(parts[2], "the name of a record");
    const auto numel = get<std::int64_t>(parts[4], "a number of elements");
    if (const auto known = storages_.find(key); known != storages_.end()) {
      return known->second;
    }
    for (const auto& known : kStorageTypes) {
      if (known.global != type) {
        continue;
      }
      const auto record = "data/" + key;
      const auto element = c10::elementSize(known.dtype);
      const auto size = archive_.hasRecord(record) ? archive_.getRecordSize(record) : 0;
      if (numel < 0 || size % element != 0 || size / element != static_cast<std::size_t>(numel)) {
        fail(fmt::format("record {} has {} bytes; wanted: {} elements of {}", record, size, numel,
                         c10::toString(known.dtype)));
      }
      const Storage storage{at::empty({numel}, at::TensorOptions(known.dtype))};
      archive_.getRecord(record, storage.elements.mutable_data_ptr(), size);
      return storages_[key] = storage;
    }
    fail(
        fmt::format("storage of type {}; wanted: one of the dtypes F64 F32 F16 BF16 I64 I32 I16 I8 "
                    "U8 BOOL",
                    type));
  }

  void reduce() {
    auto arguments = take<std::shared_ptr<Values>>("arguments");
    const auto function = take<Global>("a function").name;
    if (function == "collections OrderedDict" && arguments->empty()) {
      stack_.emplace_back(std::make_shared<Members>());
    } else if (function == "torch._utils _rebuild_tensor_v2" && arguments->size() >= 4) {
      stack_.emplace_back(rebuild_tensor(*arguments));
    } else if (function == "torch._utils _rebuild_parameter" && !arguments->empty()) {
      stack_.emplace_back(get<at::Tensor>(arguments->front(), "a tensor"));
    } else {
      fail(
          fmt::format("a call of {} with {} arguments; wanted: what torch.save uses for a "
                      "dictionary of tensors. Nothing is called",
                      function, arguments->size()));
    }
  }

  std::vector<std::int64_t> integers(Value& value) const {
    std::vector<std::int64_t> result;
    for (auto& item : *get<std::shared_ptr<Values>>(value, "a tuple of integers")) {
      result.push_back(get<std::int64_t>(item, "an integer"));
    }
    return result;
  }

  /// (storage, offset, sizes, strides, ...)
  at::Tensor rebuild_tensor(Values& arguments) const {
    const auto& elements = get<Storage>(arguments[0], "a storage").elements;
    const auto offset = get<std::int64_t>(arguments[1], "an offset");
    const auto sizes = integers(arguments[2]);
    const auto strides = integers(arguments[3]);
    // More elements than the storage has would be an expanded tensor; a damaged file could ask for
    // any amount of memory by one.
    bool fits = offset >= 0 && sizes.size() == strides.size() && are_sizes(sizes) &&
                checked_numel(sizes) <= elements.numel();
    std::int64_t last = offset;
    for (std::size_t i = 0; fits && i < sizes.size(); ++i) {
      std::int64_t reach = 0;
      fits = strides[i] >= 0 &&
             !__builtin_mul_overflow(std::max<std::int64_t>(sizes[i] - 1, 0), strides[i], &reach) &&
             !__builtin_add_overflow(last, reach, &last);
    }
    const bool is_empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
    if (!fits || (!is_empty && last >= elements.numel())) {
      fail(fmt::format("a tensor that is not within its storage of {} elements", elements.numel()));
    }
    if (is_empty) {
      return at::empty(sizes, elements.options());
    }
    return elements.as_strided(sizes, strides, offset).clone(at::MemoryFormat::Contiguous);
  }
  static bool are_sizes(const std::vector<std::int64_t>& sizes) {
    return std::all_of(sizes.begin(), sizes.end(), [](std::int64_t size) { return size >= 0; }) &&
           checked_numel(sizes) >= 0;
  }

  const fs::path& path_;
  caffe2::serialize::PyTorchStreamReader& archive_;
  std::string pickle_;
  std::size_t position_ = 0;
  Values stack_;
  std::map<std::int64_t, Value> memo_;
  std::map<std::string, Storage> storages_;
};

void check_byte_order(const fs::path& path, caffe2::serialize::PyTorchStreamReader& archive) {
  if (!archive.hasRecord("byteorder")) {
    return;
  }
  auto [data, size] = archive.getRecord("byteorder");
  const std::string_view order(static_cast<const char*>(data.get()), size);
  if (order != "little") {
    throw FileError(fmt::format("{}: byteorder: \"{}\"; wanted: \"little\"", path.string(), order));
  }
}

StateDict load_archive(const fs::path& path) {
  caffe2::serialize::PyTorchStreamReader archive(path.string());
  check_byte_order(path, archive);
  Unpickler unpickler(path, archive);
  auto value = unpickler.run();
  auto* members = std::get_if<std::shared_ptr<Members>>(&value);
  if (members == nullptr) {
    unpickler.fail("something else where a dictionary of tensors was expected");
  }
  StateDict state;
  for (auto& [key, member] : **members) {
    const auto* name = std::get_if<std::string>(&key);
    const auto* tensor = std::get_if<at::Tensor>(&member);
    if (name == nullptr || tensor == nullptr) {
      unpickler.fail(
          fmt::format("the value of {} is no tensor; wanted: a dictionary of names and "
                      "tensors",
                      name == nullptr ? "a key that is no string" : "'" + *name + "'"));
    }
    state[*name] = *tensor;
  }
  return state;
}

}  // namespace

void save_torch(const fs::path& path, const StateDict& state) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::TensorType::get());
  for (const auto& [name, tensor] : state) {
    if (!tensor.defined() || tensor.layout() != at::kStrided) {
      throw FileError(fmt::format("{}: tensor '{}' is {}; wanted: a dense tensor", path.string(),
                                  name, tensor.defined() ? "not dense" : "undefined"));
    }
    // A copy, since the whole storage of a view would be written.
    dict.insert(name, tensor.detach().cpu().clone(at::MemoryFormat::Contiguous));
  }
  std::string pickle;
  torch::jit::Pickler pickler(
      [&](const char* data, std::size_t size) { pickle.append(data, size); }, nullptr, nullptr,
      nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(dict);
  pickler.stop();

  std::string bytes;
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, std::size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  writer.writeRecord("data.pkl", pickle.data(), pickle.size());
  const auto& tensors = pickler.tensorData();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    writer.writeRecord(fmt::format("data/{}", i), tensors[i].const_data_ptr(), tensors[i].nbytes());
  }
  writer.writeEndOfFile();
  write_file(path, {bytes});
}

StateDict load_torch(const fs::path& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) {
    throw FileError(fmt::format("{}: {}; wanted: a file that torch.save wrote", path.string(),
                                error ? error.message() : "is not a file"));
  }
  try {
    return load_archive(path);
  } catch (const c10::Error& problem) {
    throw FileError(fmt::format("{}: not an archive that torch.save wrote, or damaged: {}",
                                path.string(), problem.what_without_backtrace()));
  }
}

}  // namespace fsdp
