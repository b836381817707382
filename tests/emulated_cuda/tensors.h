// Tensors of the emulated device, and the same memory as the CPU's kernels see it.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

namespace emulated {

at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, int device);
// A CPU tensor over the same bytes. `is_resizable`: kernels may put other memory below it, of the CPU.
at::Tensor cpu_alias(const at::Tensor& tensor, bool is_resizable = false);
// A tensor of the device with the shape of `view`, whose bytes are those of `base`.
at::Tensor device_view(const at::Tensor& base, const at::Tensor& view);
void resize_storage(c10::StorageImpl* storage, size_t bytes);
// An operation of the stream reads or writes a tensor; see access(). With the lock.
void touch(int stream, uint64_t time, const at::Tensor& tensor, bool is_write, const std::string& operation);

}  // namespace emulated
