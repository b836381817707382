// The functions that Python calls through ctypes.
#include "generators.h"
#include "memory.h"
#include "tensors.h"

extern "C" {

void emulated_set_receiver(emulated::Receiver receiver) { emulated::set_receiver(receiver); }
int emulated_device_count() { return emulated::device_count(); }
int emulated_device() { return emulated::current_device(); }
void emulated_set_device(int device) { emulated::set_current_device(device); }
int emulated_exchange_device(int device) {
  const int before = emulated::current_device();
  emulated::set_current_device(device);
  return before;
}
void emulated_spin(int64_t nanoseconds) { emulated::spin(emulated::current_device(), nanoseconds); }
void emulated_synchronize() { emulated::host_waits_for_all("torch.cuda.synchronize"); }
void emulated_resize_storage(void* storage, size_t bytes) {
  emulated::resize_storage(static_cast<c10::StorageImpl*>(storage), bytes);
}
void emulated_give_default_generators(int on) { emulated::give_default_generators(on); }
size_t emulated_allocated() { return emulated::allocated_bytes(); }
size_t emulated_peak() { return emulated::peak_bytes(); }
size_t emulated_reserved() { return emulated::reserved_bytes(); }
void emulated_reset_peak() { emulated::reset_peak(); }
size_t emulated_operations() { return emulated::operations(); }
}
