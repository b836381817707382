// Generators of the emulated devices.
#pragma once
#include <ATen/core/Generator.h>

namespace emulated {

const at::Generator& generator(int device);
// The CPU's generator in one of a device; raises, as CUDA does, if it is none.
const at::Generator& on_host(const at::Generator& given);
// torch makes the entries of torch.cuda.default_generators from new ones: while on, a new one is the default.
void give_default_generators(bool on);

}  // namespace emulated
