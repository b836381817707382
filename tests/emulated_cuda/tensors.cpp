#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#include "memory.h"

namespace emulated {

at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, int device) {
  TORCH_CHECK(device < device_count(), "CUDA error: invalid device ordinal ", device, " of ", device_count(), " emulated devices");
  const int before = current_device();
  set_current_device(device);
  auto made = at::detail::empty_strided_generic(sizes, strides, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype);
  set_current_device(before);
  return made;
}

static at::Tensor over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& shape, caffe2::TypeMeta dtype) {
  auto made = at::detail::make_tensor<at::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), dtype);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides(), shape.storage_offset());
  return made;
}

at::Tensor cpu_alias(const at::Tensor& tensor, bool is_resizable) {
  auto storage = tensor.storage();
  c10::DataPtr bytes(storage.mutable_data(), c10::Device(c10::kCPU));
  auto* allocator = is_resizable ? c10::GetCPUAllocator() : nullptr;
  c10::Storage cpu(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(bytes), allocator, is_resizable));
  auto made = over(std::move(cpu), c10::DispatchKey::CPU, tensor, tensor.dtype());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

at::Tensor device_view(const at::Tensor& base, const at::Tensor& view) {
  return over(c10::Storage(base.storage()), c10::DispatchKey::CUDA, view, view.dtype());
}

void touch(int s, uint64_t time, const at::Tensor& tensor, bool is_write, const std::string& operation) {
  if (!tensor.numel()) return;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const char* start = static_cast<const char*>(tensor.storage().data()) + tensor.storage_offset() * tensor.itemsize();
  access(s, time, start, (last + 1) * tensor.itemsize(), is_write, operation);
}

}  // namespace emulated
