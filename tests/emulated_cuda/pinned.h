// Pinned memory of the host, and copies between it and the device that the host has not waited for.
//
// A copy to the host lands only when the host waits. Until then its pages are closed, and who touches them is
// reported, and reads what lay there before, as on a real device. The pages that a copy to the device reads are closed to
// writes as long. Pages are the unit: an access that begins beside the copied bytes, on the same page, opens it unseen.
#pragma once
#include <c10/core/Allocator.h>

#include "order.h"

namespace emulated {

c10::Allocator& pinned_allocator();
bool is_pinned(const void* pointer);

// All with the lock. The copy is an operation of `stream` at `time`.
void copy_to_host_later(void* to, const void* from, size_t bytes, int stream, uint64_t time);
void copy_to_device_reads(const void* from, size_t bytes, int stream, uint64_t time);
void land_what_is_over();
// The device reads pinned memory on `stream`: copies to the host that it waits for land; of others there is a report.
void device_reads(const void* from, size_t bytes, int stream);

}  // namespace emulated
