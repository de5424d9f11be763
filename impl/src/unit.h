#pragma once
// One unit of sharding at work: what happens before and after its modules' forward and backward.

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "flat_parameter.h"
#include "fsdp/fully_shard.h"
#include "fsdp/module.h"
#include "fsdp/observer.h"
#include "fsdp/process_group.h"

namespace fsdp {

class Unit;

/// What the units below one root share: the order in which they run, and the present backward pass.
struct RootState {
  std::vector<std::weak_ptr<Unit>> units;      // in the order of named_modules()
  std::vector<std::weak_ptr<Unit>> order;      // of their first use in the last whole forward
  std::vector<std::weak_ptr<Unit>> new_order;  // the same of the present one
  std::vector<std::weak_ptr<Unit>> finished;   // in the order in which their forwards ended
  std::weak_ptr<Unit> reducing;                // its gradients are on their way
  int gathers_ahead = 0;
  bool end_queued = false;
};

/// The options of a unit, with groups made and defaults filled in.
struct UnitOptions {
  ShardingStrategy strategy{};
  BackendPtr shard_group;      // null if there is one shard
  BackendPtr replicate_group;  // null if there is one replica
  BackendPtr sharers;          // shard_group, or a group of this rank alone
  BackendPtr forward_group;    // parts parameters between forward and backward, if any
  int world_rank = 0;          // for messages
  std::optional<int> reshard_after_forward;  // 0 or 1
  MixedPrecision mixed_precision;
  double predivide = 1;
  double postdivide = 1;
  int forward_prefetch = 0;
  BackwardPrefetch backward_prefetch{};
  int limit_gathers = 0;
  CommHook comm_hook;
  bool find_unused = false;
  bool offload = false;
};

class Unit : public ForwardHook, public std::enable_shared_from_this<Unit> {
 public:
  Unit(UnitOptions options, std::vector<std::weak_ptr<torch::nn::Module>> modules,
       const std::vector<NamedParameter>& parameters);
  ~Unit() override;
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  void pre_forward(torch::nn::Module& module, const std::vector<at::Tensor*>& inputs) override;
  void post_forward(torch::nn::Module& module, const std::vector<at::Tensor*>& outputs) override;
  void forward_failed(torch::nn::Module& module) noexcept override;

  FlatParameter& flat() { return *flat_; }
  const UnitOptions& options() const { return options_; }
  int shards() const { return options_.shard_group ? options_.shard_group->getSize() : 1; }
  int shard() const { return options_.shard_group ? options_.shard_group->getRank() : 0; }
  int replicas() const {
    return options_.replicate_group ? options_.replicate_group->getSize() : 1;
  }
  int replica() const { return options_.replicate_group ? options_.replicate_group->getRank() : 0; }
  const std::string& name() const { return name_; }
  bool is_gathered() const { return gathered_version_.has_value(); }
  bool has_run() const { return root_ != nullptr; }
  at::ScalarType param_dtype() const;
  at::ScalarType reduce_dtype() const;

  /// Gathers the parameters, unless they are there; `wait_for_parameters` makes them usable.
  void start_unshard();
  void wait_for_parameters();
  /// Frees the gathered parameters.
  void reshard();
  /// The whole parameters in the shards' dtype, gathered anew: [padded].
  at::Tensor gather_whole();
  /// Gives the parameter up, whole: it belongs to another unit from now on.
  void release(const at::Tensor& parameter);
  /// Waits for the gradients that are on their way.
  void finish_reduction();

  // Set by the functions of fully_shard.h.
  bool requires_gradient_sync = true;
  bool requires_all_reduce = true;
  bool reshard_after_backward = true;
  bool is_last_backward = true;
  void set_reshard_after_forward(bool reshard) { options_.reshard_after_forward = reshard; }
  void set_divide_factor(double factor);
  void set_comm_hook(CommHook hook) { options_.comm_hook = std::move(hook); }

 private:
  class UseToken;

  FlatParameter::Options flat_options() const;
  /// Finds out at the first forward which units lie below this one, if it is the outermost, and
  /// gives all of them their names.
  void become_root_if_first(torch::nn::Module& module);
  void adopt(const std::shared_ptr<RootState>& root, std::string name);
  /// Names those of the unit's parameters that `module`, which lies at `path`, has.
  void name_parameters(const std::string& path, torch::nn::Module& module);
  void begin_forward_of_root();
  void end_forward_of_root();
  /// Cleans up after a pass that ended with an exception.
  void reset_after_failure();
  /// Frees what was gathered before the optimizer may have stepped. Every rank decides alike.
  void free_overtaken_parameters();
  void abandon_reduction() noexcept;
  void abandon_gather() noexcept;
  void refuse_strays(torch::nn::Module& module, const std::string& path,
                     std::vector<const Unit*> inside) const;

  void cast(const std::vector<at::Tensor*>& tensors, at::ScalarType dtype) const;
  bool keeps_parameters_after_forward() const;
  void after_forward();
  void keep_parameters_in_parts();
  void prefetch_for_forward();
  void prefetch_for_backward();
  void start_unshard_ahead();
  void count_as_used();

  void use_dropped(std::int64_t use);
  void before_backward(std::int64_t use);
  void after_backward(std::int64_t use);
  void finish_backward();
  void end_of_backward_of_root();

  void accumulate(at::Tensor whole);
  void start_reduction(at::Tensor whole);
  void deliver(at::Tensor shard);
  /// Waits for all gradients that are on their way.
  void finish_reductions();
  /// With find_unused: ranks tell each other which parameters had a gradient.
  void settle_unused_parameters();
  void observe(Point point, at::Tensor& tensor) const;

  UnitOptions options_;
  std::vector<std::weak_ptr<torch::nn::Module>> modules_;
  std::optional<FlatParameter> flat_;
  std::string name_;
  std::string gather_label_;
  std::string reduce_label_;
  std::shared_ptr<RootState> root_;
  bool is_root_ = false;

  // The gathered parameters: under way, or there since the shards had this version.
  struct Gather {
    c10::intrusive_ptr<c10d::Work> work;
    at::Tensor input;  // must live until the work is done
    std::int64_t version = 0;
  };
  std::optional<Gather> gather_;
  std::optional<std::int64_t> gathered_version_;
  bool is_ahead_ = false;  // gathered before its use
  // Since the gather began there was a gradient, so an optimizer may have stepped. The version does
  // not always tell: torch::optim::SGD goes through data(), which autograd does not notice.
  bool may_be_overtaken_ = false;
  // Between forward and backward, with a forward_group: this rank's part of the parameters.
  at::Tensor part_;
  std::int64_t part_version_ = 0;

  // A unit may run several times in a step. Each run is a use; its backward ends the use.
  std::int64_t next_use_ = 0;
  std::vector<std::int64_t>
      forward_uses_;  // entered and not yet left; nested when a module calls itself
  std::set<const torch::nn::Module*> modules_to_run_;  // of a unit of several, in this forward
  std::set<std::int64_t> pending_uses_;                // backward may still come
  std::set<std::int64_t> backward_uses_;               // in backward now
  bool in_backward_ = false;

  // Gradients between backward and optimizer.
  std::vector<bool> used_;        // parameters that had a gradient since the last reduction
  at::Tensor whole_accumulated_;  // [padded], reduce dtype: of backwards without gradient sync
  at::Tensor shard_accumulated_;  // [chunk], reduce dtype: of backwards without all-reduce
  struct Reduction {
    c10::intrusive_ptr<c10d::Work> work;  // null if there was nothing to do
    at::Tensor whole;
    at::Tensor shard;
    std::vector<bool> used;
    bool all_reduce = true;
  };
  std::optional<Reduction> reduction_;
  // With find_unused: gradients that are given out at the end of backward.
  struct MaybeUnused {
    std::size_t index;
    at::Tensor piece;
    bool used;
  };
  std::vector<MaybeUnused> maybe_unused_;
};

/// What gradients of float16 are divided by before they are summed over so many ranks: about the
/// root, so that sums neither overflow nor vanish (FSDP1's rule).
double predivide_factor_for(double ranks);

/// The unit that has the parameter, or nullptr.
Unit* owner_of(const at::Tensor& parameter);
/// The unit that `module` is, or nullptr.
std::shared_ptr<Unit> unit_of(torch::nn::Module& module);
/// The units of `module` and of everything below it, in the order of modules(), each once.
std::vector<std::shared_ptr<Unit>> units_below(torch::nn::Module& module);

}  // namespace fsdp
