#pragma once
// One unit of sharding at work: what happens before and after its module's forward and backward.

#include <torch/nn/module.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "flat_parameter.h"
#include "fsdp/module.h"
#include "fsdp/observer.h"
#include "fsdp/process_group.h"

namespace fsdp {

class Unit;

/// What the units below one root share: the state of the present backward pass.
struct RootState {
  std::vector<std::weak_ptr<Unit>> units;
  bool end_queued = false;
};

class Unit : public ForwardHook, public std::enable_shared_from_this<Unit> {
 public:
  Unit(std::shared_ptr<torch::nn::Module> module, BackendPtr process_group,
       const std::vector<FlatParameter::NamedParameter>& parameters);

  void pre_forward(torch::nn::Module& module, const std::vector<at::Tensor*>& inputs) override;
  void post_forward(torch::nn::Module& module, const std::vector<at::Tensor*>& outputs) override;
  void forward_failed(torch::nn::Module& module) noexcept override;

  FlatParameter& flat() { return flat_; }
  const BackendPtr& process_group() const { return process_group_; }
  const std::string& name() const { return name_; }

 private:
  /// Finds out at the first forward which units lie below this one, if it is the outermost, and
  /// gives all of them their names.
  void become_root_if_first(torch::nn::Module& module);
  /// Cleans up after a pass that ended with an exception.
  void reset_after_failure();
  void unshard();
  void reshard();
  void before_backward(std::int64_t use);
  void after_backward(std::int64_t use);
  void reduce_gradients();
  void end_of_backward();
  void observe(Point point, at::Tensor& tensor) const;

  BackendPtr process_group_;
  FlatParameter flat_;
  std::string name_;
  std::shared_ptr<RootState> root_;
  bool is_root_ = false;
  bool unsharded_ = false;
  // A unit may run several times in a step. Each run is a use; its backward ends the use.
  std::int64_t next_use_ = 0;
  std::vector<std::int64_t>
      forward_uses_;  // entered and not yet left; nested when a module calls itself
  std::set<std::int64_t> backward_uses_;  // in backward now
  bool in_backward_ = false;
};

/// The unit that `module` is, or nullptr.
std::shared_ptr<Unit> unit_of(torch::nn::Module& module);
/// The units of `module` and of everything below it, in the order of modules().
std::vector<std::shared_ptr<Unit>> units_below(torch::nn::Module& module);

}  // namespace fsdp
