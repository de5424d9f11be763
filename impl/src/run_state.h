#pragma once
// What a function's run depends on besides its arguments, so that it can be run again alike:
// random generators, autocast, and the buffers of a module.

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fsdp {

class RunState {
 public:
  struct Options {
    bool generators = true;
    torch::nn::Module* module = nullptr;  // whose buffers; may be null
    std::vector<at::Device> devices;      // that tensors of the run are on
  };
  /// As it is before the run.
  explicit RunState(const Options& options);
  /// After the run: forgets the buffers that it did not write.
  void forget_unwritten_buffers();

  /// Calls `body` with everything as it was before the run, and sets everything back, also if it
  /// throws. `see` is shown each generator's state before it is set, and may put another in its
  /// place.
  void replay(const std::function<void(at::Tensor& state)>& see,
              const std::function<void()>& body) const;

 private:
  struct GeneratorState {
    at::Generator generator;
    at::Tensor state;  // uint8
  };
  struct Autocast {
    at::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };
  struct Buffer {
    at::Tensor buffer;
    at::Tensor before;
  };
  at::Generator rank_generator_;
  std::vector<GeneratorState> generators_;
  std::vector<Autocast> autocast_;
  bool autocast_cache_ = true;
  std::vector<Buffer> buffers_;
};

/// Whether two strided tensors of the same shape and dtype hold the same bits.
bool has_same_bits(const at::Tensor& a, const at::Tensor& b);
/// Of two that do not.
struct BitDifference {
  std::int64_t elements = 0;  // that differ
  std::string text;  // "element 17 of [4, 16] was 0.5 and is 0.25; 3 of 64 elements differ"
};
BitDifference bit_difference(const at::Tensor& before, const at::Tensor& after);

}  // namespace fsdp
