// The main function of every suite.

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

int main(int argc, char** argv) {
  // One thread per rank and per reference: kernels split sums over threads, so their number decides
  // bits.
  at::set_num_threads(1);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
