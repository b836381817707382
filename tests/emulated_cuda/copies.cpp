// Operators that make memory of the device, copy to and from it, or read a value on the host.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <sstream>

#include "memory.h"
#include "pinned.h"
#include "tensors.h"

namespace emulated {

using c10::IntArrayRef;
template <typename T>
using Maybe = std::optional<T>;
using NoAutograd = c10::impl::ExcludeDispatchKeyGuard;

static int index_of(const Maybe<at::Device>& device) { return resolved(device ? device->index() : -1); }

static at::Tensor empty(IntArrayRef size, Maybe<at::ScalarType> dtype, Maybe<at::Layout>, Maybe<at::Device> device, Maybe<bool>,
                        Maybe<at::MemoryFormat> format) {
  c10::DeviceGuard guard(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index_of(device))));
  TORCH_CHECK(current_device() < device_count(), "CUDA error: invalid device ordinal ", current_device());
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, &device_allocator(), keys, c10::dtype_or_default(dtype), format);
}

static at::Tensor empty_strided(IntArrayRef size, IntArrayRef stride, Maybe<at::ScalarType> dtype, Maybe<at::Layout>,
                                Maybe<at::Device> device, Maybe<bool>) {
  return empty_on_device(size, stride, c10::dtype_or_default(dtype), index_of(device));
}

static std::string described(const char* what, const at::Tensor& tensor) {
  std::ostringstream text;
  text << what << " " << tensor.scalar_type() << " " << tensor.sizes();
  return text.str();
}

static void copy_to_device(at::Tensor& self, const at::Tensor& source, bool non_blocking, int s, uint64_t time) {
  const char* bytes = static_cast<const char*>(source.storage().data());
  const bool from_pinned = is_pinned(bytes);
  if (from_pinned) device_reads(bytes, source.storage().nbytes(), s);
  cpu_alias(self).copy_(source.expand(self.sizes()));
  if (!non_blocking) {
    host_waits(s, described("a copy to the device", self));
  } else if (from_pinned && source.is_non_overlapping_and_dense()) {
    copy_to_device_reads(source.data_ptr(), source.nbytes(), s, time);
  }
}

static void copy_to_host(at::Tensor& self, const at::Tensor& source, bool non_blocking, int s, uint64_t time) {
  const auto values = cpu_alias(source).expand(self.sizes());
  if (non_blocking && self.is_contiguous() && is_pinned(self.storage().data())) {
    const auto converted = values.to(self.scalar_type()).contiguous();
    copy_to_host_later(self.data_ptr(), converted.data_ptr(), converted.nbytes(), s, time);
    return;
  }
  host_waits(s, described(non_blocking ? "a copy to the host, which is not pinned," : "a copy to the host", self));
  self.copy_(values);
}

static at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (!self.numel() || self.is_same(source)) return self;
  const int device = self.is_cuda() ? self.get_device() : source.get_device();
  NoAutograd guard(c10::autograd_dispatch_keyset);
  const Launched launched("Memcpy");
  Locked locked;
  const int s = current_stream(device);
  // Between two devices, the current streams of both wait for one another, before and after, as on CUDA.
  const int other = self.is_cuda() && source.is_cuda() ? current_stream(source.get_device()) : s;
  join(stream(s).clock, stream(other).clock);
  const auto time = begin(s);
  join(stream(other).clock, stream(s).clock);
  if (self.is_cuda()) touch(s, time, self, true, "aten::copy_");
  if (source.is_cuda()) touch(s, time, source, false, "aten::copy_");
  if (self.is_cuda() && source.is_cuda()) cpu_alias(self).copy_(cpu_alias(source).expand(self.sizes()));
  else if (self.is_cuda()) copy_to_device(self, source, non_blocking, s, time);
  else copy_to_host(self, source, non_blocking, s, time);
  return self;
}

static at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  at::Tensor target = to;
  copy_(target, self, non_blocking);
  return to;
}

static at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  at::native::resize_(to, self.sizes());
  return copy_from(self, to, false);
}

static at::Scalar item(const at::Tensor& self) {
  Locked locked;
  const int s = current_stream(self.get_device());
  touch(s, begin(s), self, false, "aten::item");
  host_waits(s, described("item()", self));
  NoAutograd guard(c10::autograd_dispatch_keyset);
  return cpu_alias(self).item();
}

static at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, source, 0, count, {});
}

static at::Tensor& set_part(at::Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}

static at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }

static at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage none(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, device_allocator().allocate(0), &device_allocator(), true));
  return at::native::set_storage_cpu_(self, none, 0, {0}, {});
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) { at::native::resize_bytes_cpu(storage, bytes); }

static void record(at::Tensor& self, c10::Stream) { record_stream(self.storage().data_ptr()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", TORCH_FN(at::native::resize_));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(item));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_part));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("record_stream", TORCH_FN(record));
}

}  // namespace emulated
