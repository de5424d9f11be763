#pragma once
// One unit's flat parameter: its parameters laid end to end, padded to a multiple of the world
// size; each rank keeps one contiguous chunk. The parameters' tensors never change identity: their
// data point into the chunk outside of forward and backward, and into the gathered buffer inside.

#include <torch/types.h>

#include <string>
#include <vector>

#include "fsdp/observer.h"

namespace fsdp {

/// Every parameter starts at a multiple of this many bytes, like a tensor with a storage of its
/// own. Kernels may choose another order of summation by alignment, so this keeps sharded and
/// unsharded runs equal to the bit.
inline constexpr std::int64_t kAlignmentBytes = 64;

class FlatParameter {
 public:
  struct NamedParameter {
    std::string name;
    at::Tensor parameter;
  };

  /// Takes the parameters' present values: each rank keeps its chunk of them. All must have the
  /// same floating dtype and device, and be dense.
  FlatParameter(const std::vector<NamedParameter>& parameters, int rank, int world_size);

  const std::vector<FlatSlot>& slots() const { return slots_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  void rename(std::size_t index, std::string name) { slots_[index].name = std::move(name); }
  bool empty() const { return parameters_.empty(); }
  /// Elements of the flat parameter with all padding, and of one chunk.
  std::int64_t padded_numel() const { return chunk_numel_ * world_size_; }
  std::int64_t chunk_numel() const { return chunk_numel_; }

  /// The part of parameter `index` that this rank's chunk holds: first element within the
  /// parameter, and their number.
  struct Held {
    std::int64_t begin = 0;  // within the flattened parameter
    std::int64_t numel = 0;
    std::int64_t chunk_begin = 0;  // within the chunk
  };
  Held held(std::size_t index) const { return held_of_rank(index, rank_); }
  Held held_of_rank(std::size_t index, int rank) const;

  /// This rank's chunk: [chunk_numel].
  const at::Tensor& chunk() const { return chunk_; }
  /// The gathered buffer: [padded_numel]. It keeps one storage for life, since autograd saves views
  /// of it; the storage has no bytes unless allocated.
  const at::Tensor& gathered() const { return gathered_; }
  void allocate_gathered();
  void free_gathered();

  /// Point the parameters' data at the gathered buffer, or at this rank's chunk.
  void use_gathered();
  void use_chunk();

  /// Moves the whole gradients out of the parameters into a new flat gradient [padded_numel];
  /// missing ones and all padding are zero.
  at::Tensor take_gradients();
  /// Takes away the parameters' sharded gradients, so that autograd can make whole ones.
  void stash_sharded_gradients();
  /// Gives the stashed gradients back, if there are any.
  void restore_sharded_gradients();
  /// Gives each parameter that requires a gradient its part of `chunk_gradient` [chunk_numel],
  /// added to the stashed one.
  void set_sharded_gradients(const at::Tensor& chunk_gradient);

 private:
  at::Tensor piece_of(const at::Tensor& chunk, std::size_t index) const;

  int rank_;
  int world_size_;
  std::vector<FlatSlot> slots_;
  std::vector<at::Tensor> parameters_;
  std::int64_t chunk_numel_ = 0;
  at::Tensor chunk_;
  at::Tensor gathered_;
  std::vector<at::Tensor> gathered_views_;
  std::vector<at::Tensor> chunk_views_;
  std::vector<at::Tensor> stashed_;
};

}  // namespace fsdp
