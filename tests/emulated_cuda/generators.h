// Generators of the emulated devices.
#pragma once
#include <ATen/core/Generator.h>

namespace emulated {

const at::Generator& generator(int device);
// torch makes the entries of torch.cuda.default_generators from new ones: while on, a new one is the default.
void give_default_generators(bool on);

}  // namespace emulated
