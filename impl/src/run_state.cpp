#include "run_state.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "fsdp/random.h"
#include "rank_thread.h"

namespace fsdp {
namespace {

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

/// Writes values without a trace in the version that autograd keeps: a graph that saved the buffer
/// finds the values it saved when all is set back.
void write_unseen(const at::Tensor& buffer, const at::Tensor& values) {
  buffer.variable_data().copy_(values);
}

/// Undoes things in the reverse order, whatever happens.
class Undo {
 public:
  Undo() = default;
  ~Undo() {
    while (!steps_.empty()) {
      steps_.back()();
      steps_.pop_back();
    }
  }
  Undo(const Undo&) = delete;
  Undo& operator=(const Undo&) = delete;
  void add(std::function<void()> step) { steps_.push_back(std::move(step)); }

 private:
  std::vector<std::function<void()>> steps_;
};

}  // namespace

namespace {

/// [elements, bytes of each].
at::Tensor bytes_of(const at::Tensor& tensor) {
  const auto size = static_cast<std::int64_t>(tensor.element_size());
  return tensor.detach().contiguous().reshape({-1}).view(at::kByte).view({-1, size});
}

std::string spelled(const at::Tensor& element) {
  if (element.is_complex()) {
    return fmt::format("{:.17g}{:+.17g}i", at::real(element).item<double>(),
                       at::imag(element).item<double>());
  }
  return element.is_floating_point()
             ? fmt::format("{:.9g}", element.item<double>())
             : fmt::format("{}", element.to(at::kLong).item<std::int64_t>());
}

}  // namespace

bool has_same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::NoGradGuard no_grad;
  return a.numel() == 0 || bytes_of(a).equal(bytes_of(b));
}

BitDifference bit_difference(const at::Tensor& before, const at::Tensor& after) {
  const at::NoGradGuard no_grad;
  const auto differing =
      bytes_of(before).ne(bytes_of(after)).any(/*dim=*/1).nonzero().reshape({-1});
  const auto first = differing[0].item<std::int64_t>();
  const auto value = [first](const at::Tensor& tensor) {
    return spelled(tensor.detach().reshape({-1})[first]);
  };
  return {differing.numel(),
          fmt::format("element {} of [{}] was {} and is {}; {} of {} elements differ", first,
                      fmt::join(before.sizes(), ", "), value(before), value(after),
                      differing.numel(), before.numel())};
}

RunState::RunState(const Options& options) : rank_generator_(rank_generator()) {
  const at::NoGradGuard no_grad;
  auto devices = options.devices;
  std::sort(devices.begin(), devices.end(), [](at::Device a, at::Device b) {
    return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
  });
  devices.erase(std::unique(devices.begin(), devices.end()), devices.end());
  if (options.generators) {
    generators_.push_back({rank_generator_, state_of(rank_generator_)});
    if (!shares_process()) {
      const auto add_default = [this](at::Device device) {
        const auto& generator = at::globalContext().defaultGenerator(device);
        generators_.push_back({generator, state_of(generator)});
      };
      add_default(at::kCPU);
      for (const auto device : devices) {
        if (device.is_cuda()) {
          add_default(device);
        }
      }
    }
  }
  std::vector<at::DeviceType> types = {at::kCPU};
  for (const auto device : devices) {
    if (device.is_cuda() && types.size() == 1) {
      types.push_back(device.type());
    }
  }
  for (const auto type : types) {
    autocast_.push_back(
        {type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)});
  }
  autocast_cache_ = at::autocast::is_autocast_cache_enabled();
  if (options.module != nullptr) {
    for (const auto& buffer : options.module->buffers()) {
      if (buffer.defined() && !buffer.is_meta()) {
        buffers_.push_back({buffer, buffer.detach().clone()});
      }
    }
  }
}

void RunState::forget_unwritten_buffers() {
  // By value, since kernels such as batch_norm write without a trace in the version.
  std::erase_if(buffers_, [](const Buffer& each) {
    return each.buffer.scalar_type() == each.before.scalar_type() &&
           each.buffer.sizes() == each.before.sizes() && has_same_bits(each.buffer, each.before);
  });
}

void RunState::replay(const std::function<void(at::Tensor& state)>& see,
                      const std::function<void()>& body) const {
  Undo undo;
  {
    const at::NoGradGuard no_grad;
    for (const auto& each : generators_) {
      undo.add([generator = each.generator, now = state_of(each.generator)] {
        set_state(generator, now);
      });
      auto state = each.state;
      see(state);
      set_state(each.generator, state);
    }
    for (const auto& each : autocast_) {
      undo.add([type = each.device, enabled = at::autocast::is_autocast_enabled(each.device),
                dtype = at::autocast::get_autocast_dtype(each.device)] {
        at::autocast::set_autocast_enabled(type, enabled);
        at::autocast::set_autocast_dtype(type, dtype);
      });
      at::autocast::set_autocast_enabled(each.device, each.enabled);
      at::autocast::set_autocast_dtype(each.device, each.dtype);
    }
    undo.add([cache = at::autocast::is_autocast_cache_enabled()] {
      at::autocast::set_autocast_cache_enabled(cache);
    });
    at::autocast::set_autocast_cache_enabled(autocast_cache_);
    for (const auto& each : buffers_) {
      undo.add([buffer = each.buffer, now = each.buffer.detach().clone()] {
        const at::NoGradGuard inside;
        write_unseen(buffer, now);
      });
      write_unseen(each.buffer, each.before);
    }
  }
  // Backward may run on a thread of the engine, whose own generator is another.
  const GeneratorScope scope(rank_generator_);
  body();
}

}  // namespace fsdp
