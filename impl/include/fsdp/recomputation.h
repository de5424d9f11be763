#pragma once
// Activation checkpointing of a function: what autograd would keep of a run for backward is thrown
// away, and made anew by running the function again when backward first needs it. Memory for time;
// no value changes. (Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.)
// For modules, see activation_checkpoint.h.
//
//   auto y = fsdp::checkpoint([&](const torch::Tensor& x) { return block2(block1(x)); }, x);
//
// The function is run as it was: with the same arguments, the same random numbers, the same
// autocast, and grad mode on. It stops as soon as the last tensor that backward needs is there. The
// graph that backward runs through is that of the first run, so hooks on tensors and gradients run
// once. Regions may be nested and may contain units of fully_shard or lie within one. Backward may
// run twice (retain_graph), and each run recomputes.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/errors.h"
#include "fsdp/visit_tensors.h"

namespace fsdp {

/// A second run of a checkpointed function does not do what the first did, or cannot be made. The
/// message names the region, the tensor, what the first run saved and what the second did.
struct RecomputationError : Error {
  using Error::Error;
};

/// What is asked of a recomputed tensor before backward uses it.
enum class RecomputationCheck {
  none,
  metadata,  // shape, dtype and device are those of the first run, and so is their number
  values,    // every bit too. Then the first run's tensors are kept: it costs more memory than
             // storing, and is for looking for mistakes
};

/// A tensor that autograd saved in the first run, and what the second made of it.
struct RecomputedActivation {
  std::string_view region;  // name of the checkpointed module or function
  std::int64_t index = 0;   // how many tensors the region saved before this one
  std::string operation;    // that saved it, for example "aten::gelu"
  const at::Tensor& stored;
  const at::Tensor& recomputed;
};

struct RecomputationOptions {
  /// Runs again with the states that the generators had: of this rank (rank_generator), libtorch's
  /// default one of the CPU, and those of the accelerators that inputs are on. Ranks that are
  /// threads of one process (run_ranks, world size above 1) share libtorch's default generators, so
  /// there only the rank's own is set back: draw from rank_generator(), as fsdp::Dropout does.
  bool preserve_rng_state = true;
  /// Ends the second run at the last tensor that is needed. With false it runs to the end, and a
  /// second run that saves fewer or more tensors than the first is an error too.
  bool early_stop = true;
  RecomputationCheck check = RecomputationCheck::metadata;
  /// Keeps the function's floating-point inputs on this device until they are needed, for example
  /// the CPU (in pinned memory if they come from an accelerator).
  std::optional<at::Device> keep_inputs_on{};
  /// Called in backward with each recomputed tensor beside the first run's, which is then kept.
  std::function<void(const RecomputedActivation&)> on_recomputed{};
  /// In messages. Modules have their names in the model.
  std::string name{};
};

/// Whether this thread is running a checkpointed function again.
bool is_recomputing();

namespace detail {

/// One run of a checkpointed function. Lives as long as the graph that the run made.
class CheckpointFrame;

/// Between begin and end, what autograd saves on this thread goes into a frame.
class FirstRun {
 public:
  /// `module` may be null; its buffers are set back for the second run. The tensors are the
  /// function's inputs, some perhaps undefined: they are taken over and left undefined.
  FirstRun(const RecomputationOptions& options, torch::nn::Module* module,
           const std::vector<at::Tensor*>& inputs);
  ~FirstRun();
  FirstRun(const FirstRun&) = delete;
  FirstRun& operator=(const FirstRun&) = delete;

  /// The inputs, as they were given. `run_again` runs the function with inputs like them.
  std::vector<at::Tensor> begin(std::function<void(const std::vector<at::Tensor>&)> run_again);
  /// The function has returned.
  void end();

 private:
  struct Open;
  std::shared_ptr<CheckpointFrame> frame_;
  std::vector<at::Tensor> inputs_;
  std::unique_ptr<Open> open_;
};

/// Of all tensors, undefined ones too.
template <typename T>
std::vector<at::Tensor*> all_tensors_in(T& value) {
  std::vector<at::Tensor*> found;
  visit_tensors(value, [&found](at::Tensor& tensor) { found.push_back(&tensor); });
  return found;
}

template <typename T>
void fill_tensors(T& value, const std::vector<at::Tensor>& tensors) {
  auto next = tensors.begin();
  visit_tensors(value, [&next](at::Tensor& tensor) { tensor = *next++; });
}

/// Calls `function(arguments...)` as a checkpointed region.
template <typename Function, typename... Args>
auto run_checkpointed(const RecomputationOptions& options, torch::nn::Module* module,
                      Function function, std::tuple<Args...> arguments) {
  using Result = std::decay_t<decltype(std::apply(function, arguments))>;
  static_assert((std::copy_constructible<Args> && ...),
                "a checkpointed function's arguments are copied for its second run");
  if (!at::GradMode::is_enabled()) {
    return Result(std::apply(function, arguments));
  }
  FirstRun run(options, module, all_tensors_in(arguments));
  fill_tensors(arguments,
               run.begin([function, arguments](const std::vector<at::Tensor>& inputs) mutable {
                 auto filled = arguments;
                 fill_tensors(filled, inputs);
                 std::apply(function, filled);
               }));
  Result result = std::apply(function, arguments);
  run.end();
  return result;
}

}  // namespace detail

/// Runs `function(args...)` and lets backward run it again. Tensors are found in arguments as
/// visit_tensors says; other arguments are copied, and must not change until backward. So must
/// whatever else the function reads. Without grad mode, it is a plain call. Throws in backward:
/// RecomputationError, and what the function throws. UsageError: the program embeds Python's
/// autograd, which has hooks of its own.
template <typename Function, typename... Args>
requires std::invocable < Function&, std::decay_t<Args>
&... > auto checkpoint(const RecomputationOptions& options, Function function, Args&&... args) {
  return detail::run_checkpointed(options, nullptr, std::move(function),
                                  std::tuple<std::decay_t<Args>...>(std::forward<Args>(args)...));
}
template <typename Function, typename... Args>
requires std::invocable < Function&, std::decay_t<Args>
&... > auto checkpoint(Function function, Args&&... args) {
  return checkpoint(RecomputationOptions(), std::move(function), std::forward<Args>(args)...);
}

/// Runs the layers one after another in `segments` regions of about the same number of layers. The
/// last is stored, since backward begins there (as torch.utils.checkpoint.checkpoint_sequential).
/// With about sqrt(L) segments of L layers, memory for activations grows with sqrt(L). Throws
/// UsageError unless 1 <= segments <= layers.
using LayerFunction = std::function<torch::Tensor(const torch::Tensor&)>;
torch::Tensor checkpoint_sequential(const std::vector<LayerFunction>& layers, std::size_t segments,
                                    torch::Tensor input, const RecomputationOptions& options = {});

/// How the second run of a region compares with the first.
struct RecomputationReport {
  struct Difference {
    std::int64_t index = 0;
    std::string operation;
    std::string what;  // "element 17 of [4, 16] was 0.5 and is 0.25; 3 of 64 elements differ"
    std::int64_t elements = 0;  // that differ
  };
  std::int64_t tensors = 0;             // saved by the first run and recomputed
  std::int64_t bytes = 0;               // of them: what checkpointing does not keep
  std::vector<Difference> differences;  // in the order of saving
  std::string error;                    // why the second run ended early, "" if it did not

  bool is_equal() const { return error.empty() && differences.empty() && tensors > 0; }
};

/// Options of a region that adds to the report, which must live as long, whenever it runs again. It
/// runs to the end then.
RecomputationOptions reporting_to(RecomputationReport& report, RecomputationOptions options = {});

namespace detail {
void run_backward_into(RecomputationReport& report, const std::vector<at::Tensor*>& results);
}  // namespace detail

/// Runs `function(args...)`, and then backward of the sum of its floating-point results, so that
/// the region is recomputed, and says how every saved tensor compares. Leaves gradients in the
/// leaves, as any backward does. A tool for one's own modules. Results are not compared, and state
/// of the function's own that both runs advance is not seen.
template <typename Function, typename... Args>
RecomputationReport check_recomputation(const RecomputationOptions& options, Function function,
                                        Args&&... args) {
  RecomputationReport report;
  auto results =
      checkpoint(reporting_to(report, options), std::move(function), std::forward<Args>(args)...);
  detail::run_backward_into(report, tensors_in(results));
  return report;
}

}  // namespace fsdp
