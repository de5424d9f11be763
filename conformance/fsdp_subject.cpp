#include "conformance/fsdp_subject.h"

#include <fmt/format.h>
#include <fsdp/activation_checkpoint.h>
#include <fsdp/fully_shard.h>
#include <fsdp/grad_scaler.h>
#include <fsdp/process_group.h>
#include <torch/optim.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <limits>
#include <mutex>
#include <thread>

#include "conformance/rank_messages.h"
#include "conformance/rank_trace.h"
#include "reference/data.h"
#include "reference/models.h"

namespace shardproof {
namespace {

/// Thrown on the rank threads when the reader wants no more.
struct Stopped : std::exception {
  const char* what() const noexcept override { return "the reader stopped"; }
};

/// Joins the ranks' contributions into step traces and hands them over, a few steps at a time.
class Collector {
 public:
  Collector(int world_size, int steps_ahead, std::shared_ptr<StrikeLog> strikes)
      : world_size_(world_size), steps_ahead_(steps_ahead), strikes_(std::move(strikes)) {}

  /// One rank's part, from its thread.
  void put(int rank, int step, RankTrace trace) {
    std::unique_lock lock(mutex_);
    auto& pending = pending_[step];
    pending.resize(world_size_);
    pending[rank] = std::move(trace);
    if (std::all_of(pending.begin(), pending.end(),
                    [](const auto& each) { return !each.tensors.empty(); })) {
      add(step, std::move(pending));
      pending_.erase(step);
    }
    wait_for_reader(lock, step);
  }

  /// All ranks' parts at once.
  void put_all(int step, std::vector<RankTrace> ranks) {
    std::unique_lock lock(mutex_);
    add(step, std::move(ranks));
    wait_for_reader(lock, step);
  }

  /// There are no more steps. How the reader says that it ended; throws Stopped if it went without
  /// saying.
  int wait_for_conclusion() {
    std::unique_lock lock(mutex_);
    is_complete_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return stopped_ || conclusion_; });
    if (!conclusion_) {
      throw Stopped();
    }
    return *conclusion_;
  }

  void conclude(int code) {
    const std::lock_guard lock(mutex_);
    conclusion_ = code;
    changed_.notify_all();
  }

  std::optional<StepTrace> take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !ready_.empty() || is_complete_ || ended_; });
    if (ready_.empty()) {
      if (error_) {
        std::rethrow_exception(error_);
      }
      return std::nullopt;
    }
    auto trace = std::move(ready_.front());
    ready_.pop_front();
    ++taken_;
    changed_.notify_all();
    return trace;
  }

  void stop() {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
  }

  void end(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    error_ = std::move(error);
    changed_.notify_all();
  }

 private:
  void add(int step, std::vector<RankTrace> ranks) {
    for (const auto& rank : ranks) {
      for (const auto& strike : rank.strikes) {
        if (strikes_ != nullptr) {
          strikes_->add(strike);
        }
      }
    }
    ready_.push_back(join(step, std::move(ranks)));
    changed_.notify_all();
  }

  void wait_for_reader(std::unique_lock<std::mutex>& lock, int step) {
    changed_.wait(lock, [&] { return stopped_ || step < taken_ + steps_ahead_; });
    if (stopped_) {
      throw Stopped();
    }
  }

  const int world_size_;
  const int steps_ahead_;
  const std::shared_ptr<StrikeLog> strikes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, std::vector<RankTrace>> pending_;
  std::deque<StepTrace> ready_;
  int taken_ = 0;
  bool stopped_ = false;
  bool is_complete_ = false;
  bool ended_ = false;
  std::optional<int> conclusion_;
  std::exception_ptr error_;
};

fsdp::ShardingStrategy strategy_of(const Scenario& scenario) {
  using S = fsdp::ShardingStrategy;
  for (const auto strategy :
       {S::full_shard, S::shard_grad_op, S::no_shard, S::hybrid_shard, S::hybrid_shard_zero2}) {
    if (scenario.strategy == fsdp::to_string(strategy)) {
      return strategy;
    }
  }
  throw ScenarioError("strategy is \"" + scenario.strategy + "\"; wanted: one of fsdp.h");
}

fsdp::BackwardPrefetch prefetch_of(const std::string& name) {
  return name == "pre"    ? fsdp::BackwardPrefetch::pre
         : name == "post" ? fsdp::BackwardPrefetch::post
                          : fsdp::BackwardPrefetch::none;
}

std::optional<at::ScalarType> dtype_if_set(const std::string& name) {
  return name.empty() ? std::nullopt : std::optional<at::ScalarType>(dtype_named(name));
}

/// What every unit of the model is made with; the root's outputs are cast besides.
fsdp::FullyShardOptions unit_options(const Scenario& scenario, const fsdp::RankContext& context) {
  fsdp::FullyShardOptions options;
  options.strategy = strategy_of(scenario);
  if (scenario.strategy.starts_with("hybrid")) {
    options.mesh = fsdp::make_device_mesh(context.process_group, scenario.replicas);
  } else {
    options.process_group = context.process_group;
  }
  if (scenario.schedule.reshard_after_forward >= 0) {
    options.reshard_after_forward = scenario.schedule.reshard_after_forward;
  }
  options.forward_prefetch = scenario.schedule.forward_prefetch;
  options.backward_prefetch = prefetch_of(scenario.schedule.backward_prefetch);
  options.limit_gathers = scenario.schedule.limit_gathers;
  options.mixed_precision.param_dtype = dtype_if_set(scenario.precision.parameter);
  options.mixed_precision.reduce_dtype = dtype_if_set(scenario.precision.reduce);
  options.mixed_precision.buffer_dtype = dtype_if_set(scenario.precision.buffer);
  if (scenario.divide.post > 0) {
    options.gradient_predivide_factor = scenario.divide.pre > 0 ? scenario.divide.pre : 1;
    options.gradient_postdivide_factor = scenario.divide.post;
  }
  return options;
}

/// Norms that compute in full precision are units of their own, with no policy but that of the
/// reduction.
void shard_exempt_norms(Model& model, const Scenario& scenario, fsdp::FullyShardOptions options) {
  options.mixed_precision = {};
  options.mixed_precision.reduce_dtype = dtype_named(reduce_dtype(scenario));
  for (const auto& module : model->modules(/*include_self=*/false)) {
    if (std::dynamic_pointer_cast<NormImpl>(module) != nullptr) {
      fsdp::fully_shard(module, options);
    }
  }
}

/// Fills modules that were made without memory from a whole copy of the model.
std::function<void(torch::nn::Module&)> filler(
    const Model& model, const Scenario& scenario,
    const std::map<std::string, torch::Tensor>& initial) {
  auto source = std::make_shared<Model>(make_model(scenario));
  load_parameters(**source, initial);
  return [source, &model = *model](torch::nn::Module& module) {
    const auto named = model.named_modules();
    const auto named_sources = (*source)->named_modules();
    for (const auto& candidate : named) {
      if (candidate.value().get() != &module) {
        continue;
      }
      const auto& from = named_sources[candidate.key()];
      for (const auto& own : module.named_parameters(/*recurse=*/false)) {
        own.value().copy_(from->named_parameters(/*recurse=*/false)[own.key()]);
      }
      for (const auto& own : module.named_buffers(/*recurse=*/false)) {
        own.value().copy_(from->named_buffers(/*recurse=*/false)[own.key()]);
      }
      return;
    }
  };
}

/// Makes regions that run again in backward; `on_recomputed` sees all of their saved tensors.
void checkpoint_model(Model& model, const Scenario& scenario,
                      const std::function<void(const fsdp::RecomputedActivation&)>& on_recomputed) {
  fsdp::RecomputationOptions options;
  options.early_stop = scenario.checkpointing.early_stop;
  options.on_recomputed = on_recomputed;
  if (scenario.checkpointing.layers == "segments") {
    model->run_in_segments(layers_per_segment(scenario),
                           [options](const std::string& name, const ModelImpl::Call& layers,
                                     const torch::Tensor& input) {
                             auto own = options;
                             own.name = name;
                             return fsdp::checkpoint(own, layers, input);
                           });
    return;
  }
  const auto layers = model->layers();
  const std::size_t step = scenario.checkpointing.layers == "alternate" ? 2 : 1;
  for (std::size_t i = 0; i < layers.size(); i += step) {
    options.name = layers[i].name;
    fsdp::checkpoint_module(*layers[i].module, options);
  }
}

/// Makes the model of one rank and its units, the way the scenario says.
void shard_model(Model& model, const Scenario& scenario,
                 const std::map<std::string, torch::Tensor>& initial,
                 const fsdp::RankContext& context) {
  auto options = unit_options(scenario, context);
  if (scenario.construction == "meta") {
    fsdp::to_meta(*model);
    options.device = torch::kCPU;
    options.param_init_fn = filler(model, scenario, initial);
  } else if (scenario.construction == "sync" && context.rank != 0) {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) {
      parameter.fill_(std::numeric_limits<double>::quiet_NaN());
    }
    options.sync_module_states = true;
  } else {
    load_parameters(*model, initial);
    options.sync_module_states = scenario.construction == "sync";
  }
  if (scenario.precision.exempt_norms) {
    shard_exempt_norms(model, scenario, options);
  }
  if (scenario.wrap == "layer") {
    for (const auto& layer : model->layers()) {
      fsdp::fully_shard(layer.module, options);
    }
  }
  options.mixed_precision.output_dtype = dtype_if_set(scenario.precision.output);
  fsdp::fully_shard(model, options);
}

/// One rank's training run.
class RankTrainer {
 public:
  RankTrainer(const Scenario& scenario, const std::map<std::string, torch::Tensor>& initial,
              const FsdpSubject::Options& options, fsdp::RankContext& context)
      : scenario_(scenario),
        options_(options),
        rank_(context.rank),
        data_(scenario),
        model_(make_model(scenario)) {
    // Before sharding, because hooks that are added later see an output earlier: what is recorded
    // is what the unit gives to its caller.
    record_outputs(model_, [this](const std::string& name, const torch::Tensor& output) {
      add(Quantity::output, name + "@m" + std::to_string(micro_batch_), output.sizes().vec(),
          Placement::per_rank, 0, output);
    });
    if (options.in_forward) {
      record_outputs(model_, [this](const std::string&, const torch::Tensor&) {
        options_.in_forward(rank_, step_);
      });
    }
    const auto checkpoint_it = [&] {
      checkpoint_model(model_, scenario,
                       [this](const fsdp::RecomputedActivation& seen) { add_recomputed(seen); });
    };
    const auto& checkpointing = scenario.checkpointing;
    if (checkpointing.layers != "none" && checkpointing.order == "inside") {
      checkpoint_it();
    }
    shard_model(model_, scenario, initial, context);
    if (checkpointing.order == "around") {
      checkpoint_it();
    }
    std::vector<torch::Tensor> parameters;
    for (const auto& placement : fsdp::shard_placements(*model_)) {
      parameters.push_back(placement.parameter);
    }
    optimizer_ = make_optimizer(scenario.optimizer, std::move(parameters));
    if (scenario.loss_scale > 0) {
      fsdp::GradScalerOptions scaling;
      scaling.init_scale = scenario.loss_scale;
      scaler_.emplace(scaling, context.process_group);
    }
    if (options.fault != nullptr) {
      fault_ = options.fault->make_observer(scenario, rank_);
      strikes_ = std::make_shared<StrikeLog>();
      fault_->log_to(strikes_);
    }
  }

  RankTrace step(int step) {
    step_ = step;
    trace_ = {};
    recomputed_.clear();
    if (options_.before_step) {
      options_.before_step(rank_, step);
    }
    if (fault_) {
      fault_->begin_step(step);
    }
    const fsdp::ObserverScope scope(fault_.get());
    optimizer_->zero_grad();
    forward_and_backward();
    const auto placements = fsdp::shard_placements(*model_);
    // Backward runs from the last layer to the first.
    const auto add_gradients = [&](Quantity quantity) {
      for (auto placement = placements.rbegin(); placement != placements.rend(); ++placement) {
        if (placement->parameter.grad().defined()) {
          add_shard(quantity, placement->name, *placement, placement->parameter.grad());
        }
      }
    };
    if (scaler_) {
      scaler_->unscale_(*optimizer_);
    }
    add_gradients(Quantity::gradient);
    const auto norm = scenario_.max_norm > 0
                          ? fsdp::clip_grad_norm_(*model_, scenario_.max_norm, scenario_.norm_type)
                          : fsdp::grad_norm(*model_, scenario_.norm_type);
    add(Quantity::total_norm, "total_norm", {}, Placement::replicated, 0, norm);
    add_gradients(Quantity::clipped_gradient);
    if (scaler_) {
      scaler_->step(*optimizer_);
      scaler_->update(scenario_.loss_scale);  // the scenario's scale stays as it is
    } else {
      optimizer_->step();
    }
    for (const auto& placement : placements) {
      add_shard(Quantity::parameter, placement.name, placement, placement.parameter);
    }
    for (const auto& placement : placements) {
      add_optimizer_state(placement);
    }
    if (strikes_) {
      trace_.strikes = strikes_->take();
    }
    return std::move(trace_);
  }

 private:
  void forward_and_backward() {
    std::vector<torch::Tensor> losses;
    for (micro_batch_ = 0; micro_batch_ < scenario_.micro_batches; ++micro_batch_) {
      const bool is_last = micro_batch_ + 1 == scenario_.micro_batches;
      fsdp::set_requires_gradient_sync(*model_, scenario_.accumulation != "last" || is_last);
      fsdp::set_requires_all_reduce(*model_,
                                    scenario_.accumulation != "last_all_reduce" || is_last);
      const auto batch = data_.batch(step_, micro_batch_, rank_);
      auto loss = model_->training_loss(
          [this](const torch::Tensor& input) { return model_(input); }, batch.input, batch.target);
      losses.push_back(loss.detach());
      if (scenario_.micro_batches > 1) {
        loss = loss / scenario_.micro_batches;
      }
      (scaler_ ? scaler_->scale(loss) : loss).backward();
    }
    add(Quantity::loss, "loss", {scenario_.micro_batches}, Placement::per_rank, 0,
        torch::stack(losses));
  }

  void add(Quantity quantity, std::string name, std::vector<std::int64_t> shape,
           Placement placement, std::int64_t offset, const torch::Tensor& values) {
    TraceTensor tensor;
    tensor.quantity = quantity;
    tensor.name = std::move(name);
    tensor.shape = std::move(shape);
    tensor.placement = placement;
    tensor.pieces.push_back(
        {rank_, offset, values.detach().cpu().clone(torch::MemoryFormat::Contiguous)});
    trace_.tensors.push_back(std::move(tensor));
  }

  /// Called in backward.
  void add_recomputed(const fsdp::RecomputedActivation& seen) {
    const auto name = fmt::format("{}/{}:{}@m{}", seen.region, seen.index,
                                  seen.operation.empty() ? "input" : seen.operation, micro_batch_);
    const int times = recomputed_[name]++;
    const auto unique = times == 0 ? name : fmt::format("{}+{}", name, times);
    const auto numbers = [](const torch::Tensor& tensor) {
      return tensor.is_floating_point() ? tensor : tensor.to(torch::kFloat64);
    };
    add(Quantity::saved_activation, unique, seen.stored.sizes().vec(), Placement::per_rank, 0,
        numbers(seen.stored));
    add(Quantity::recomputed_activation, unique, seen.recomputed.sizes().vec(), Placement::per_rank,
        0, numbers(seen.recomputed));
  }

  void add_shard(Quantity quantity, std::string name, const fsdp::ShardPlacement& placement,
                 const torch::Tensor& values) {
    add(quantity, std::move(name), placement.sizes, Placement::sharded, placement.begin, values);
  }

  void add_optimizer_state(const fsdp::ShardPlacement& placement) {
    const auto found = optimizer_->state().find(placement.parameter.unsafeGetTensorImpl());
    if (found == optimizer_->state().end()) {
      return;
    }
    const auto add_part = [&](const char* kind, const torch::Tensor& values) {
      if (values.defined()) {
        add_shard(Quantity::optimizer_state, std::string(kind) + "/" + placement.name, placement,
                  values);
      }
    };
    if (scenario_.optimizer.kind == "adamw") {
      const auto& state = static_cast<torch::optim::AdamWParamState&>(*found->second);
      add_part("exp_avg", state.exp_avg());
      add_part("exp_avg_sq", state.exp_avg_sq());
    } else {
      add_part("momentum_buffer",
               static_cast<torch::optim::SGDParamState&>(*found->second).momentum_buffer());
    }
  }

  const Scenario& scenario_;
  const FsdpSubject::Options& options_;
  const int rank_;
  Dataset data_;
  Model model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::optional<fsdp::GradScaler> scaler_;
  std::unique_ptr<StepObserver> fault_;
  std::shared_ptr<StrikeLog> strikes_;
  int step_ = 0;
  int micro_batch_ = 0;
  std::map<std::string, int> recomputed_;  // how often each name came in this step
  RankTrace trace_;
};

}  // namespace

namespace {

fsdp::RunRanksOptions run_options(const Scenario& scenario, const FsdpSubject::Options& options) {
  fsdp::RunRanksOptions run_options;
  run_options.group.timeout = options.timeout;
  run_options.seed = scenario.seed;
  return run_options;
}

}  // namespace

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const OptimizerSpec& spec,
                                                        std::vector<torch::Tensor> parameters) {
  if (spec.kind == "sgd") {
    return std::make_unique<torch::optim::SGD>(
        std::move(parameters),
        torch::optim::SGDOptions(spec.lr).momentum(spec.momentum).weight_decay(spec.weight_decay));
  }
  return std::make_unique<torch::optim::AdamW>(std::move(parameters),
                                               torch::optim::AdamWOptions(spec.lr)
                                                   .betas({spec.beta1, spec.beta2})
                                                   .eps(spec.eps)
                                                   .weight_decay(spec.weight_decay));
}

struct FsdpSubject::Impl {
  Impl(const Scenario& run_scenario, std::map<std::string, torch::Tensor> run_initial,
       Options run_options)
      : scenario(run_scenario),
        initial(std::move(run_initial)),
        options(std::move(run_options)),
        collector(scenario.world_size, options.steps_ahead, options.strikes),
        thread([this] { run(); }) {}

  void run() {
    std::exception_ptr error;
    try {
      if (options.process_group == nullptr) {
        run_threads();
      } else {
        run_first();
      }
    } catch (...) {
      error = std::current_exception();
    }
    collector.end(error);
  }

  void run_threads() {
    fsdp::run_ranks(
        scenario.world_size,
        [this](fsdp::RankContext& context) {
          RankTrainer trainer(scenario, initial, options, context);
          for (int step = 0; step < scenario.steps; ++step) {
            collector.put(context.rank, step, trainer.step(step));
          }
        },
        run_options(scenario, options));
  }

  /// This process is rank 0, and the others send it their parts.
  void run_first() {
    fsdp::run_rank(
        options.process_group,
        [this](fsdp::RankContext& context) {
          const RankMessages messages(context.process_group);
          RankTrainer trainer(scenario, initial, options, context);
          for (int step = 0; step < scenario.steps; ++step) {
            std::vector<RankTrace> ranks;
            ranks.push_back(trainer.step(step));
            const auto parts = messages.gather_on_first({});
            for (std::size_t rank = 1; rank < parts.size(); ++rank) {
              ranks.push_back(unpack(parts[rank]));
            }
            collector.put_all(step, std::move(ranks));
          }
          messages.from_first(std::to_string(collector.wait_for_conclusion()));
        },
        run_options(scenario, options));
  }

  const Scenario scenario;
  const std::map<std::string, torch::Tensor> initial;
  const Options options;
  Collector collector;
  std::thread thread;
};

FsdpSubject::FsdpSubject(const Scenario& scenario, std::map<std::string, torch::Tensor> initial,
                         Options options)
    : impl_(std::make_unique<Impl>(scenario, std::move(initial), std::move(options))) {}

FsdpSubject::~FsdpSubject() {
  impl_->collector.stop();
  if (impl_->thread.joinable()) {
    impl_->thread.join();
  }
}

std::optional<StepTrace> FsdpSubject::next() {
  return impl_->collector.take();
}

void FsdpSubject::conclude(int code) {
  impl_->collector.conclude(code);
  impl_->thread.join();
}

int FsdpSubject::follow(const Scenario& scenario,
                        const std::map<std::string, torch::Tensor>& initial,
                        const Options& options) {
  int code = 0;
  fsdp::run_rank(
      options.process_group,
      [&](fsdp::RankContext& context) {
        const RankMessages messages(context.process_group);
        RankTrainer trainer(scenario, initial, options, context);
        for (int step = 0; step < scenario.steps; ++step) {
          messages.gather_on_first(pack(trainer.step(step)));
        }
        code = std::stoi(messages.from_first({}));
      },
      run_options(scenario, options));
  return code;
}

}  // namespace shardproof
