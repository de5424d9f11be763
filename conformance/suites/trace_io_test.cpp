// Traces, states and safetensors files: what is written is read back to the bit, and nothing that
// is damaged is taken for a trace.

#include "conformance/trace_io.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <torch/torch.h>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "conformance/suites/temporary_folder.h"

namespace shardproof {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string slurp(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void spit(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

/// A safetensors file made by hand: the length of the header, the header, the data.
std::string safetensors_bytes(const std::string& header, const std::string& data) {
  const std::uint64_t length = header.size();
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes + header + data;
}

std::string header_of(const std::string& bytes) {
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof(length));
  return bytes.substr(sizeof(length), length);
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  // An empty tensor has no address, which memcmp must not be given.
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         (a.numel() == 0 || std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0);
}

void expect_same_step(const StepTrace& got, const StepTrace& want) {
  ASSERT_EQ(got.step, want.step);
  ASSERT_EQ(got.tensors.size(), want.tensors.size());
  for (std::size_t i = 0; i < want.tensors.size(); ++i) {
    const TraceTensor& a = got.tensors[i];
    const TraceTensor& b = want.tensors[i];
    ASSERT_EQ(a.quantity, b.quantity);
    ASSERT_EQ(a.name, b.name);
    ASSERT_EQ(a.shape, b.shape);
    ASSERT_EQ(a.placement, b.placement);
    ASSERT_EQ(a.pieces.size(), b.pieces.size());
    for (std::size_t j = 0; j < b.pieces.size(); ++j) {
      ASSERT_EQ(a.pieces[j].rank, b.pieces[j].rank);
      ASSERT_EQ(a.pieces[j].offset, b.pieces[j].offset);
      ASSERT_TRUE(same_bits(a.pieces[j].values, b.pieces[j].values)) << b.name;
    }
  }
}

/// One tensor of each placement, an empty shard, a scalar, and execution order that is not the
/// order of the names.
StepTrace small_step(int step = 0) {
  const at::Tensor weight =
      torch::tensor({1.5F, -0.0F, 3e-41F, NAN, INFINITY, -2.25F}).view({2, 3});
  const at::Tensor flat = weight.flatten();
  StepTrace trace;
  trace.step = step;
  trace.tensors = {
      {Quantity::output,
       "model@m0",
       {1, 2},
       Placement::per_rank,
       {{0, 0, torch::tensor({{1.0F, 2.0F}})}, {1, 0, torch::tensor({{3.0F, 4.0F}})}},
       {}},
      {Quantity::gradient,
       "b.weight",
       {2, 3},
       Placement::sharded,
       {{0, 0, flat.slice(0, 0, 4).clone()},
        {1, 4, flat.slice(0, 4, 6).clone()},
        {2, 6, torch::empty({0})}},
       {}},
      {Quantity::total_norm,
       "total_norm",
       {},
       Placement::replicated,
       {{0, 0, torch::tensor(0.1F)}, {1, 0, torch::tensor(0.1F)}},
       {}},
      {Quantity::parameter, "a.weight", {2, 3}, Placement::single, {{kNoRank, 0, weight}}, {}},
  };
  return trace;
}

/// As small as a step can be that has pieces.
StepTrace tiny_step() {
  StepTrace trace;
  trace.tensors = {{Quantity::gradient,
                    "w",
                    {2},
                    Placement::sharded,
                    {{0, 0, torch::tensor({1.0F})}, {1, 1, torch::tensor({2.0F})}},
                    {}}};
  return trace;
}

class TraceIo : public ::testing::Test {
 protected:
  fs::path file(const std::string& name = "file.safetensors") const {
    return folder_.path() / name;
  }
  fs::path folder() const { return folder_.path(); }
  /// The message of the FileError that reading `bytes` as a safetensors file throws.
  std::string refusal(const std::string& bytes) const {
    spit(file(), bytes);
    try {
      read_safetensors(file());
    } catch (const FileError& error) {
      EXPECT_NE(std::string(error.what()).find(file().string()), std::string::npos)
          << "the message does not name the file: " << error.what();
      return error.what();
    }
    return "";
  }
  /// The message of the FileError that reading a step throws whose metadata were changed by
  /// `change`.
  template <typename Change>
  std::string step_refusal(Change change) const {
    write_step(file(), small_step());
    SafetensorsFile content = read_safetensors(file());
    json tensors = json::parse(content.metadata.at("tensors"));
    change(content, tensors);
    content.metadata["tensors"] = tensors.dump();
    write_safetensors(file(), content);
    try {
      read_step(file());
    } catch (const FileError& error) {
      return error.what();
    }
    return "";
  }
  std::vector<std::string> names_in_folder() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder())) {
      names.push_back(entry.path().filename().string());
    }
    return names;
  }

 private:
  TemporaryFolder folder_;
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_F(TraceIo, EveryDtypeComesBackToTheBit) {
  SafetensorsFile content;
  content.metadata = {{"format", "x"}, {"quote", "\"\\\n\xC3\xA4"}};
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong,
                                     at::kInt, at::kShort, at::kChar, at::kByte, at::kBool}) {
    content.tensors[std::string("t.") + c10::toString(dtype)] =
        torch::randn({3, 5}).mul_(50).abs_().to(dtype);
  }
  content.tensors["scalar"] = torch::tensor(2.5);
  content.tensors["empty"] = torch::empty({0, 4});
  write_safetensors(file(), content);
  const SafetensorsFile back = read_safetensors(file());
  EXPECT_EQ(back.metadata, content.metadata);
  ASSERT_EQ(back.tensors.size(), content.tensors.size());
  for (const auto& [name, tensor] : content.tensors) {
    EXPECT_TRUE(same_bits(back.tensors.at(name), tensor)) << name;
  }
}

TEST_F(TraceIo, ATransposedTensorIsWrittenByItsElementsNotItsMemory) {
  const at::Tensor tensor = torch::arange(6, torch::kFloat).view({2, 3}).t();
  write_safetensors(file(), {{{"t", tensor}}, {}});
  EXPECT_TRUE(same_bits(read_safetensors(file()).tensors.at("t"), tensor.contiguous()));
}

TEST_F(TraceIo, TheDataBeginAtAMultipleOfEightBytesAndWideElementsComeFirst) {
  // safetensors README: the header may end in spaces; the Python library aligns in the same way.
  write_safetensors(
      file(),
      {{{"a", torch::zeros({3}, torch::kByte)}, {"z", torch::zeros({1}, torch::kDouble)}}, {}});
  const std::string header = header_of(slurp(file()));
  EXPECT_EQ(header.size() % 8, 0U);
  EXPECT_EQ(json::parse(header)["z"]["data_offsets"], json({0, 8}));
}

TEST_F(TraceIo, AStepComesBackToTheBitInExecutionOrder) {
  write_step(file(), small_step(3));
  expect_same_step(read_step(file()), small_step(3));
}

TEST_F(TraceIo, AStepHasTheDocumentedKeysAndMetadata) {
  write_step(file(), small_step(3));
  const SafetensorsFile content = read_safetensors(file());
  EXPECT_EQ(content.metadata.at("format"), "shardproof.trace/1");
  EXPECT_EQ(content.metadata.at("step"), "3");
  const json tensors = json::parse(content.metadata.at("tensors"));
  EXPECT_EQ(tensors[1], json::parse(R"({"quantity": "gradient", "name": "b.weight", "shape": [2, 3],
      "placement": "sharded", "pieces": [
        {"rank": 0, "offset": 0, "key": "gradient/b.weight/rank0"},
        {"rank": 1, "offset": 4, "key": "gradient/b.weight/rank1"},
        {"rank": 2, "offset": 6, "key": "gradient/b.weight/rank2"}]})"));
  EXPECT_EQ(tensors[3]["pieces"],
            json::parse(R"([{"rank": -1, "offset": 0, "key": "parameter/a.weight/whole"}])"));
  EXPECT_TRUE(content.tensors.contains("parameter/a.weight/whole"));
}

TEST_F(TraceIo, AStateComesBackToTheBit) {
  TrainingState state;
  state.steps_done = 7;
  state.parameters["a.weight"] = torch::randn({2, 3});
  state.optimizer_state["exp_avg/a.weight"] = torch::randn({2, 3});
  write_state(file(), state);
  EXPECT_TRUE(read_safetensors(file()).tensors.contains("optimizer_state/exp_avg/a.weight"));
  const TrainingState back = read_state(file());
  EXPECT_EQ(back.steps_done, 7);
  EXPECT_TRUE(same_bits(back.parameters.at("a.weight"), state.parameters.at("a.weight")));
  EXPECT_TRUE(same_bits(back.optimizer_state.at("exp_avg/a.weight"),
                        state.optimizer_state.at("exp_avg/a.weight")));
  EXPECT_EQ(back.optimizer_state.size(), 1U);
}

TEST_F(TraceIo, AStateSaysHowManyStepsTheOptimizerTook) {
  TrainingState state;
  state.steps_done = 7;
  state.left_out = 3;
  write_state(file(), state);
  EXPECT_EQ(read_state(file()).steps_done, 7);
  EXPECT_EQ(read_state(file()).optimizer_steps(), 4);
  SafetensorsFile content = read_safetensors(file());
  EXPECT_EQ(content.metadata.at("optimizer_steps"), "4");
  content.metadata.erase("optimizer_steps");
  write_safetensors(file(), content);
  EXPECT_EQ(read_state(file()).optimizer_steps(), 7);
  content.metadata["optimizer_steps"] = "8";
  write_safetensors(file(), content);
  EXPECT_THROW(read_state(file()), FileError);
}

TEST_F(TraceIo, SixteenBitTensorsComeBackToTheBit) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    auto values = torch::randn({3, 5}).to(dtype);
    values[0][0] = INFINITY;
    values[0][1] = NAN;
    values[0][2] = -0.0F;
    values[0][3] = 0x1p-24;  // the smallest float16
    StepTrace step = small_step();
    step.tensors = {
        {Quantity::parameter, "w", {3, 5}, Placement::single, {{kNoRank, 0, values}}, {}}};
    write_step(file(), step);
    const at::Tensor back = read_step(file()).tensors.at(0).pieces.at(0).values;
    EXPECT_EQ(back.scalar_type(), dtype);
    EXPECT_TRUE(same_bits(back, values));
  }
}

TEST_F(TraceIo, AStateFileIsNotTakenForAStepNorAStepForAState) {
  write_state(file("state"), {});
  write_step(file("step"), small_step());
  EXPECT_THROW(read_step(file("state")), FileError);
  EXPECT_THROW(read_state(file("step")), FileError);
}

TEST_F(TraceIo, AFileCutAtAnyByteIsRefused) {
  write_step(file("whole"), tiny_step());
  const std::string bytes = slurp(file("whole"));
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    ASSERT_NE(refusal(bytes.substr(0, length)), "") << "cut to " << length << " bytes";
  }
  EXPECT_EQ(refusal(bytes), "");
  EXPECT_TRUE(contains(refusal(bytes + "x"), "1 bytes follow the last tensor"));
}

TEST_F(TraceIo, ADamagedHeaderIsRefusedOrMeansTheSame) {
  // Every byte of the length and the header in turn gets some other values; what is still
  // accepted as a step must describe tensors of exactly the bytes in the file.
  write_step(file("whole"), tiny_step());
  const std::string bytes = slurp(file("whole"));
  const std::size_t header_end = 8 + header_of(bytes).size();
  std::mt19937 generator(1);
  int accepted = 0;
  for (std::size_t at = 0; at < header_end; ++at) {
    for (const char value : {'\xFF', '9', static_cast<char>(bytes[at] ^ (1 << generator() % 8))}) {
      std::string damaged = bytes;
      damaged[at] = value;
      spit(file(), damaged);
      try {
        const StepTrace step = read_step(file());
        std::size_t data = 0;
        for (const TraceTensor& tensor : step.tensors) {
          for (const Piece& piece : tensor.pieces) {
            data += piece.values.nbytes();
          }
        }
        ASSERT_EQ(data, bytes.size() - header_end) << "byte " << at;
        ++accepted;
      } catch (const FileError& error) {
        ASSERT_TRUE(contains(error.what(), file().string())) << error.what();
      }
    }
  }
  // Names may change and stay names, so some are accepted; the same byte is always.
  EXPECT_GT(accepted, 0);
}

TEST_F(TraceIo, RandomBytesAreRefused) {
  std::mt19937 generator(2);
  for (int round = 0; round < 200; ++round) {
    std::string bytes(generator() % 200, '\0');
    for (char& byte : bytes) {
      byte = static_cast<char>(generator());
    }
    if (round % 2 == 1 && bytes.size() > 9) {
      const std::uint64_t length = bytes.size() - 8 - generator() % 2;
      std::memcpy(bytes.data(), &length, 8);
      bytes[8] = '{';
    }
    ASSERT_NE(refusal(bytes), "");
  }
}

struct BadHeader {
  const char* name;
  const char* header;
  int data_bytes;
  const char* message;
};

class BadHeaders : public TraceIo, public ::testing::WithParamInterface<BadHeader> {};

TEST_P(BadHeaders, AreRefusedWithAMessageThatSaysWhy) {
  const BadHeader& bad = GetParam();
  const std::string message =
      refusal(safetensors_bytes(bad.header, std::string(bad.data_bytes, '\1')));
  EXPECT_TRUE(contains(message, bad.message)) << message;
}

INSTANTIATE_TEST_SUITE_P(
    TraceIo, BadHeaders,
    ::testing::Values(
        BadHeader{"NotJson", "{oops", 0, "not valid JSON"},
        BadHeader{"Empty", "", 0, "does not begin with '{'"},
        BadHeader{"Array", "[1]", 0, "does not begin with '{'"},
        BadHeader{
            "DuplicateTensor",
            R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
            1, "\"a\" occurs twice"},
        BadHeader{"DuplicateField",
                  R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1,
                  "\"dtype\" occurs twice"},
        BadHeader{"UnknownDtype", R"({"a":{"dtype":"F8","shape":[1],"data_offsets":[0,1]}})", 1,
                  "a dtype of F64"},
        BadHeader{"MissingDtype", R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1,
                  "\"dtype\" is missing"},
        BadHeader{"UnknownField", R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1}})",
                  1, "only"},
        BadHeader{"NegativeSize", R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1,
                  "shape[0]"},
        BadHeader{"FractionalSize", R"({"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", 1,
                  "shape[0]"},
        BadHeader{"ShapeOverflow",
                  R"({"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0,
                  "overflows"},
        BadHeader{"ShapeOverflowBesideZero",
                  R"({"a":{"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}})",
                  0, "overflows"},
        BadHeader{"BytesOverflow",
                  R"({"a":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}})", 0,
                  "overflows"},
        BadHeader{"SizeTooLargeForAnInteger",
                  R"({"a":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,1]}})", 1,
                  "shape[0]"},
        BadHeader{"SpanNotTheShape", R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4,
                  "need 8 bytes, data_offsets span 4"},
        BadHeader{"OffsetsBackwards", R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", 1,
                  "begin <= end"},
        BadHeader{"ThreeOffsets", R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,1]}})", 1,
                  "begin <= end"},
        BadHeader{
            "Overlap",
            R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
            3, "inside the one before"},
        BadHeader{
            "Gap",
            R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
            3, "leaving a gap"},
        BadHeader{"GapAtTheStart", R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})", 3,
                  "leaving a gap"},
        BadHeader{"DataMissing", R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 3,
                  "truncated"},
        BadHeader{"DataLeftOver", R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 3,
                  "2 bytes follow"},
        BadHeader{"MetadataNotText", R"({"__metadata__":{"a":1}})", 0, "a string"},
        BadHeader{"MetadataNotAnObject", R"({"__metadata__":[]})", 0, "an object"},
        BadHeader{"TensorNotAnObject", R"({"a":3})", 0, "an object"},
        BadHeader{"NotUtf8", "{\"\xFF\":3}", 0, "not valid JSON"},
        BadHeader{
            "TooDeep",
            R"({"a":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]})",
            0, "nested deeper"}),
    [](const auto& info) { return info.param.name; });

TEST_F(TraceIo, ABoolThatIsNeitherZeroNorOneIsRefused) {
  const std::string message = refusal(
      safetensors_bytes(R"({"a":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}})", "\x01\x02"));
  EXPECT_TRUE(contains(message, "byte 1 is 2, a BOOL is 0 or 1")) << message;
}

TEST_F(TraceIo, AHeaderLengthOfManyGigabytesIsRefusedBeforeMemoryIsTaken) {
  std::string bytes(16, '\0');
  bytes[7] = '\x7F';
  EXPECT_TRUE(contains(refusal(bytes), "not a safetensors file"));
}

TEST_F(TraceIo, AMissingFileAFolderAndADeviceAreNamed) {
  EXPECT_THROW(read_safetensors(file("none")), FileError);
  EXPECT_THROW(read_safetensors(folder()), FileError);
  EXPECT_THROW(read_safetensors("/dev/zero"), FileError);
}

TEST_F(TraceIo, AnotherVersionIsRefusedWithAHint) {
  const std::string message = step_refusal(
      [](SafetensorsFile& content, json&) { content.metadata["format"] = "shardproof.trace/2"; });
  EXPECT_TRUE(contains(message, "shardproof.trace/2")) << message;
  EXPECT_TRUE(contains(message, "make the file again")) << message;
}

TEST_F(TraceIo, PiecesThatDoNotFitTheFileAreRefused) {
  const auto with = [&](auto change) {
    return step_refusal([&](SafetensorsFile&, json& tensors) { change(tensors); });
  };
  EXPECT_EQ(with([](json&) {}), "");
  EXPECT_TRUE(contains(with([](json& t) { t[1]["pieces"][1]["key"] = "nowhere"; }),
                       "tensors[1].pieces[1]: the file has no tensor \"nowhere\""));
  EXPECT_TRUE(contains(with([](json& t) { t[1]["pieces"][1]["key"] = t[1]["pieces"][0]["key"]; }),
                       "another piece has it"));
  EXPECT_TRUE(contains(with([](json& t) { t[1]["pieces"].erase(2); }), "belongs to no piece"));
  EXPECT_TRUE(contains(with([](json& t) { t.erase(0); }), "belongs to no piece"));
  EXPECT_TRUE(contains(with([](json& t) { t[1]["pieces"] = json::array(); }), "no pieces"));
  EXPECT_TRUE(
      contains(with([](json& t) { t[1]["pieces"][1]["offset"] = 5; }), "no run of the 6 elements"));
  EXPECT_TRUE(contains(with([](json& t) { t[1]["pieces"][1]["offset"] = INT64_MAX; }),
                       "no run of the 6 elements"));
  EXPECT_TRUE(contains(with([](json& t) { t[1]["pieces"][1]["rank"] = 0; }),
                       "the piece of rank 0 follows that of rank 0"));
  EXPECT_TRUE(contains(with([](json& t) { t[1]["pieces"][0]["rank"] = -1; }),
                       "does not fit placement sharded"));
  EXPECT_TRUE(contains(with([](json& t) { t[3]["pieces"][0]["rank"] = 0; }),
                       "does not fit placement single"));
  EXPECT_TRUE(contains(with([](json& t) { t[3]["shape"] = {3, 2}; }), "shape [2, 3]"));
  EXPECT_TRUE(contains(with([](json& t) { t[0]["placement"] = "sharded"; }), "no run"));
  EXPECT_TRUE(contains(with([](json& t) { t[0]["placement"] = "here"; }), "per_rank, replicated"));
  EXPECT_TRUE(contains(with([](json& t) { t[0]["quantity"] = "weight"; }), "a quantity"));
  EXPECT_TRUE(contains(with([](json& t) { t[0].erase("name"); }), "\"name\" is missing"));
  EXPECT_TRUE(contains(with([](json& t) { t = json::object(); }), "an array"));
}

TEST_F(TraceIo, AStepNumberThatIsNoneIsRefused) {
  for (const char* step : {"", "-1", "1.5", "0x1", "99999999999", "1 "}) {
    EXPECT_NE(
        step_refusal([&](SafetensorsFile& content, json&) { content.metadata["step"] = step; }), "")
        << step;
  }
}

TEST_F(TraceIo, AStepThatContradictsItselfIsNotWritten) {
  StepTrace twice = small_step();
  twice.tensors.push_back(twice.tensors[0]);
  EXPECT_THROW(write_step(file(), twice), TraceError);
  StepTrace shifted = small_step();
  shifted.tensors[1].pieces[2].offset = 7;
  EXPECT_THROW(write_step(file(), shifted), TraceError);
  StepTrace without_rank = small_step();
  without_rank.tensors[0].pieces[0].rank = kNoRank;
  EXPECT_THROW(write_step(file(), without_rank), TraceError);
  EXPECT_TRUE(names_in_folder().empty());
}

TEST_F(TraceIo, AFolderOfStepsComesBack) {
  Scenario scenario;
  scenario.seed = 42;
  TraceWriter writer(folder() / "trace", scenario, "a test");
  writer.add(small_step(0));
  writer.add(small_step(1));
  EXPECT_THROW(TraceReader(folder() / "trace"), FileError) << "a run that did not end";
  writer.finish();
  const TraceReader reader(folder() / "trace");
  EXPECT_EQ(reader.scenario(), scenario);
  ASSERT_EQ(reader.steps(), 2);
  expect_same_step(reader.step(1), small_step(1));
  EXPECT_THROW(reader.step(2), TraceError);
  EXPECT_THROW(reader.step(-1), TraceError);
}

TEST_F(TraceIo, StepsAreWrittenInOrder) {
  TraceWriter writer(folder() / "trace", Scenario(), "a test");
  EXPECT_THROW(writer.add(small_step(1)), TraceError);
}

TEST_F(TraceIo, ANewTraceReplacesTheOldOneWhole) {
  {
    TraceWriter writer(folder() / "trace", Scenario(), "a test");
    writer.add(small_step(0));
    writer.add(small_step(1));
    writer.finish();
  }
  TraceWriter writer(folder() / "trace", Scenario(), "a test");
  EXPECT_THROW(TraceReader(folder() / "trace"), FileError);
  writer.add(small_step(0));
  writer.finish();
  EXPECT_EQ(TraceReader(folder() / "trace").steps(), 1);
  EXPECT_FALSE(fs::exists(folder() / "trace" / "step-00001.safetensors"));
}

TEST_F(TraceIo, ATraceWhoseStepsWereMixedUpIsRefused) {
  TraceWriter writer(folder() / "trace", Scenario(), "a test");
  writer.add(small_step(0));
  writer.add(small_step(1));
  writer.finish();
  fs::copy_file(folder() / "trace/step-00000.safetensors",
                folder() / "trace/step-00001.safetensors", fs::copy_options::overwrite_existing);
  EXPECT_THROW(TraceReader(folder() / "trace").step(1), FileError);
}

TEST_F(TraceIo, ADamagedTraceJsonIsRefused) {
  TraceWriter writer(folder() / "trace", Scenario(), "a test");
  writer.finish();
  const fs::path path = folder() / "trace/trace.json";
  const std::string text = slurp(path);
  for (std::size_t length = 0; length + 2 < text.size(); ++length) {
    spit(path, text.substr(0, length));
    ASSERT_THROW(TraceReader(folder() / "trace"), FileError) << length;
  }
  for (const char* change : {R"({"format":"shardproof.trace/2"})", R"({"steps":-1})",
                             R"({"steps":"2"})", R"({"scenario":[]})"}) {
    json trace = json::parse(text);
    trace.update(json::parse(change));
    spit(path, trace.dump());
    EXPECT_THROW(TraceReader(folder() / "trace"), FileError) << change;
  }
}

/// Caps the size of files that this process may write, as a disk does that is full.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &limit);
    handler_ = std::signal(SIGXFSZ, SIG_IGN);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int) = nullptr;
};

TEST_F(TraceIo, AFullDiskLeavesTheOldFileAndNothingElse) {
  write_safetensors(file(), {{{"old", torch::zeros({4})}}, {}});
  const std::string before = slurp(file());
  {
    const FileSizeLimit limit(4096);
    EXPECT_THROW(write_safetensors(file(), {{{"new", torch::zeros({10000})}}, {}}), FileError);
    EXPECT_THROW(write_safetensors(file("other"), {{{"new", torch::zeros({10000})}}, {}}),
                 FileError);
  }
  EXPECT_EQ(slurp(file()), before);
  EXPECT_EQ(names_in_folder().size(), 1U);
}

TEST_F(TraceIo, ADeviceOrAFolderIsNotReplacedByAFile) {
  EXPECT_THROW(write_file("/dev/full", {"x"}), FileError);
  EXPECT_THROW(write_file(folder(), {"x"}), FileError);
  EXPECT_THROW(write_file(folder() / "no/such/folder/file", {"x"}), FileError);
}

// ---- The document -------------------------------------------------------------------------------

/// The one block of Python in trace-format.md.
std::string documented_program() {
  const std::string text =
      slurp(fs::path(SHARDPROOF_SOURCE_FOLDER) / "conformance/trace-format.md");
  const std::string begin = "```python\n";
  const auto from = text.find(begin) + begin.size();
  EXPECT_EQ(text.find(begin, from), std::string::npos) << "there is more than one example";
  return text.substr(from, text.find("```\n", from) - from);
}

/// What the example computes, by the words around it: a linear model on two ranks.
class DocumentedRun {
 public:
  StepTrace step(int step) {
    torch::manual_seed(static_cast<std::uint64_t>(step));
    const auto inputs = torch::randn({2, 5, 3});
    const auto targets = torch::randn({2, 5, 2});
    const auto weight = weight_.clone().requires_grad_();
    const auto bias = bias_.clone().requires_grad_();
    std::vector<at::Tensor> outputs, losses;
    for (int rank = 0; rank < 2; ++rank) {
      outputs.push_back(torch::matmul(inputs[rank], weight.t()) + bias);
      losses.push_back((outputs[rank] - targets[rank]).square().mean());
    }
    const auto gradients = torch::autograd::grad({(losses[0] + losses[1]) / 2}, {weight, bias});
    const auto norm = torch::cat({gradients[0].flatten(), gradients[1]}).norm();
    const auto factor = (1.0 / (norm + 1e-6)).clamp_max(1);
    weight_ = weight_ - 0.5 * factor * gradients[0];
    bias_ = bias_ - 0.5 * factor * gradients[1];

    StepTrace trace;
    trace.step = step;
    add(trace, Quantity::output, "layers.0@m0", Placement::per_rank, outputs);
    add(trace, Quantity::output, "model@m0", Placement::per_rank, outputs);
    add(trace, Quantity::loss, "loss", Placement::per_rank,
        {losses[0].view({1}), losses[1].view({1})});
    add_parameters(trace, Quantity::gradient, gradients[0], gradients[1]);
    add(trace, Quantity::total_norm, "total_norm", Placement::replicated, {norm, norm});
    add_parameters(trace, Quantity::clipped_gradient, gradients[0] * factor, gradients[1] * factor);
    add_parameters(trace, Quantity::parameter, weight_, bias_);
    return trace;
  }

 private:
  static void add(StepTrace& trace, Quantity quantity, const std::string& name, Placement placement,
                  const std::vector<at::Tensor>& values) {
    trace.tensors.push_back({quantity,
                             name,
                             values[0].sizes().vec(),
                             placement,
                             {{0, 0, values[0].detach()}, {1, 0, values[1].detach()}},
                             {}});
  }
  static void add_parameters(StepTrace& trace, Quantity quantity, const at::Tensor& weight,
                             const at::Tensor& bias) {
    add(trace, quantity, "layers.0.linear.bias", Placement::replicated, {bias, bias});
    const auto flat = weight.flatten();
    trace.tensors.push_back({quantity,
                             "layers.0.linear.weight",
                             {2, 3},
                             Placement::sharded,
                             {{0, 0, flat.slice(0, 0, 3)}, {1, 3, flat.slice(0, 3, 6)}},
                             {}});
  }

  at::Tensor weight_ = torch::ones({2, 3});
  at::Tensor bias_ = torch::zeros({2});
};

TEST_F(TraceIo, TheExampleInTheDocumentIsRead) {
  spit(folder() / "example.py", documented_program());
  const char* named = std::getenv("SHARDPROOF_PYTHON");
  const std::string python = named != nullptr && *named != '\0' ? named : SHARDPROOF_PYTHON_PROGRAM;
  const auto command = "cd '" + folder().string() + "' && '" + python + "' example.py 2>&1";
  ASSERT_EQ(std::system(command.c_str()), 0) << command;

  const TraceReader reader(folder() / "my-run");
  EXPECT_EQ(reader.scenario().model.kind, "mlp");
  EXPECT_EQ(reader.scenario().model.sizes, (std::vector<std::int64_t>{3, 2}));
  EXPECT_EQ(reader.scenario().world_size, 2);
  EXPECT_EQ(reader.scenario().optimizer.lr, 0.5);
  ASSERT_EQ(reader.steps(), 2);
  DocumentedRun run;
  for (int step = 0; step < 2; ++step) {
    const StepTrace got = reader.step(step);
    const StepTrace want = run.step(step);
    EXPECT_EQ(got.step, step);
    ASSERT_EQ(got.tensors.size(), want.tensors.size());
    for (std::size_t i = 0; i < want.tensors.size(); ++i) {
      const TraceTensor& a = got.tensors[i];
      const TraceTensor& b = want.tensors[i];
      SCOPED_TRACE(std::string(to_string(b.quantity)) + " " + b.name);
      EXPECT_EQ(a.quantity, b.quantity);
      EXPECT_EQ(a.name, b.name);
      EXPECT_EQ(a.shape, b.shape);
      EXPECT_EQ(a.placement, b.placement);
      ASSERT_EQ(a.pieces.size(), b.pieces.size());
      for (std::size_t j = 0; j < b.pieces.size(); ++j) {
        EXPECT_EQ(a.pieces[j].rank, b.pieces[j].rank);
        EXPECT_EQ(a.pieces[j].offset, b.pieces[j].offset);
        ASSERT_EQ(a.pieces[j].values.sizes(), b.pieces[j].values.sizes());
        EXPECT_EQ(a.pieces[j].values.scalar_type(), at::kFloat);
        // The mean gradient is computed in another order here.
        EXPECT_TRUE(torch::allclose(a.pieces[j].values, b.pieces[j].values, 1e-5, 1e-6))
            << a.pieces[j].values << "\nbut wanted\n"
            << b.pieces[j].values;
      }
    }
  }
}

}  // namespace
}  // namespace shardproof
