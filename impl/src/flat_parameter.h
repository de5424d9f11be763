#pragma once
// One unit's flat parameter: its parameters laid end to end, padded to a multiple of the number of
// shards; each rank keeps one contiguous chunk. The parameters' tensors never change identity:
// their data point into the chunk outside of forward and backward, and into the gathered buffer
// inside.

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/observer.h"

namespace fsdp {

/// Every parameter starts at a multiple of this many bytes, like a tensor with a storage of its
/// own. Kernels may choose another order of summation by alignment, so this keeps sharded and
/// unsharded runs equal to the bit.
inline constexpr std::int64_t kAlignmentBytes = 64;

struct NamedParameter {
  std::string name;
  at::Tensor parameter;
};

class FlatParameter {
 public:
  struct Options {
    int shard = 0;  // this rank's
    int shards = 1;
    std::optional<at::ScalarType>
        param_dtype;       // of the gathered buffer; unset: the parameters' own
    bool offload = false;  // the chunk is kept on the CPU
  };

  /// Takes the parameters' present values: each rank keeps its chunk of them. All must have the
  /// same floating dtype and device, and be dense. Throws ShardingError, naming the parameter.
  FlatParameter(const std::vector<NamedParameter>& parameters, const Options& options);

  const std::vector<FlatSlot>& slots() const { return slots_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  void rename(std::size_t index, std::string name) { slots_[index].name = std::move(name); }
  bool empty() const { return parameters_.empty(); }
  /// True if any parameter requires a gradient now.
  bool trains() const;
  /// Elements of the flat parameter with all padding, and of one chunk.
  std::int64_t padded_numel() const { return chunk_numel_ * options_.shards; }
  std::int64_t chunk_numel() const { return chunk_numel_; }
  at::ScalarType dtype() const { return chunk_.scalar_type(); }
  at::Device device() const { return gathered_.device(); }
  /// Counts the in-place changes of the parameters, so that a gathered copy can be told from one
  /// that an optimizer has overtaken.
  std::int64_t version() const;
  /// Whether some parameter has a gradient now.
  bool has_gradients() const;

  /// The part of parameter `index` that a shard holds: first element within the flattened
  /// parameter, and their number.
  struct Held {
    std::int64_t begin = 0;  // within the flattened parameter
    std::int64_t numel = 0;
    std::int64_t chunk_begin = 0;  // within the chunk
  };
  Held held(std::size_t index) const { return held_by(index, options_.shard); }
  Held held_by(std::size_t index, int shard) const;

  /// This rank's chunk: [chunk_numel].
  const at::Tensor& chunk() const { return chunk_; }
  /// The chunk in the dtype and on the device of the gathered buffer; itself, if it has these.
  at::Tensor gather_input() const { return chunk_.to(gathered_.options()); }
  /// The gathered buffer: [padded_numel]. It keeps one storage for life, since autograd saves views
  /// of it; the storage has no bytes unless allocated.
  const at::Tensor& gathered() const { return gathered_; }
  /// There is one shard, and nothing to cast: the chunk is the gathered buffer.
  bool gathered_is_chunk() const { return gathered_is_chunk_; }
  void allocate_gathered();
  void free_gathered();

  /// Point the parameters' data at the gathered buffer, or at this rank's chunk.
  void use_gathered();
  void use_chunk();
  /// Points them at their pieces of `whole` [padded_numel], in the chunk's dtype.
  void use_whole(const at::Tensor& whole);

  /// Moves the whole gradients out of the parameters into a new flat gradient [padded_numel];
  /// missing ones and all padding are zero. Sets used[i] for each parameter that had one.
  at::Tensor take_gradients(at::ScalarType dtype, std::vector<bool>& used);
  /// Takes away the parameters' sharded gradients, so that autograd can make whole ones.
  void stash_sharded_gradients();
  /// Gives the stashed gradients back, if there are any.
  void restore_sharded_gradients();
  /// This rank's part of parameter `index`, in `chunk_like` [chunk_numel].
  at::Tensor piece_of(const at::Tensor& chunk_like, std::size_t index) const;
  /// Gives parameter `index` this gradient, added to the stashed one; undefined: the stashed alone.
  void set_sharded_gradient(std::size_t index, at::Tensor piece);

 private:
  std::vector<at::Tensor> views_of(const at::Tensor& whole) const;
  void lay_out(const std::vector<NamedParameter>& parameters);

  Options options_;
  std::vector<FlatSlot> slots_;
  std::vector<at::Tensor> parameters_;
  std::int64_t chunk_numel_ = 0;
  at::Tensor chunk_;
  at::Tensor gathered_;
  bool gathered_is_chunk_ = false;
  std::vector<at::Tensor> gathered_views_;
  std::vector<at::Tensor> chunk_views_;
  std::vector<at::Tensor> stashed_;
  // set_data to another dtype makes a parameter forget the autograd node that adds up its gradient.
  // It is kept here and given back, so that the uses of several forwards are added up by one node,
  // in the order of one device.
  std::vector<std::weak_ptr<torch::autograd::Node>> accumulators_;
};

}  // namespace fsdp
