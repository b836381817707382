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
// Returns why there is no memory for it, or null: ctypes lets no exception through.
const char* emulated_resize_storage(void* storage, size_t bytes) {
  static thread_local std::string refusal;
  try {
    emulated::resize_storage(static_cast<c10::StorageImpl*>(storage), bytes);
    return nullptr;
  } catch (const c10::OutOfMemoryError& error) {
    refusal = error.what_without_backtrace();
    return refusal.c_str();
  }
}
void emulated_give_default_generators(int on) { emulated::give_default_generators(on); }
size_t emulated_total() { return emulated::memory_of_device(); }
size_t emulated_allocated(int device) { return emulated::usage_of(device).allocated; }
size_t emulated_peak(int device) { return emulated::usage_of(device).peak; }
size_t emulated_reserved(int device) { return emulated::usage_of(device).reserved; }
size_t emulated_peak_reserved(int device) { return emulated::usage_of(device).peak_reserved; }
void emulated_reset_peak(int device) { emulated::reset_peak(device); }
void emulated_empty_cache() { emulated::empty_cache(emulated::current_device()); }
size_t emulated_operations() { return emulated::operations(); }
}
