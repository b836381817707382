// Memory of the emulated device: an allocator that keeps freed blocks by stream, and who reads and writes what.
#pragma once
#include <c10/core/Allocator.h>

#include "order.h"

namespace emulated {

c10::Allocator& device_allocator();
int device_of(const void* pointer);  // -1: not of the allocator

// An operation of `stream` at `time` reads or writes so many bytes; what nothing orders after an earlier access, or
// after the last use of what lay there before, is reported as a race. With the lock.
void access(int stream, uint64_t time, const void* start, size_t bytes, bool is_write, const std::string& operation);

// Tensor.record_stream(): the block is reused only once that stream is through with it.
void record_stream(const c10::DataPtr& pointer);

struct Usage {
  size_t allocated = 0, peak = 0, reserved = 0, peak_reserved = 0;  // bytes
};
Usage usage_of(int device);
void reset_peak(int device);
// What EMULATED_CUDA_MEMORY says, of each device for each process. Above it, allocation raises c10::OutOfMemoryError.
size_t memory_of_device();
void empty_cache(int device);  // free blocks go back to the system

}  // namespace emulated
