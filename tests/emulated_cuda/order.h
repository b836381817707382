// The order of what happens on the emulated device: streams, the host, and what each of them has waited for.
#pragma once
#include <ATen/record_function.h>

#include <cstdint>
#include <string>
#include <vector>

namespace emulated {

// A vector clock. Entry s: how many operations of stream s are known to be over.
using Clock = std::vector<uint64_t>;

void join(Clock& into, const Clock& other);
bool covers(const Clock& clock, int stream, uint64_t time);

struct Stream {
  int device;
  int64_t id;  // 0: the device's default stream
  Clock clock;
  uint64_t time = 0;  // of its newest operation
};

struct Event {
  Clock clock;
  double seconds = 0;
};

// Holds the emulator's one lock, as often as a thread likes. Reports that are made meanwhile are delivered once it is
// free again: Python takes its own lock for them, and another thread may hold that one while it waits for this.
struct Locked {
  Locked();
  ~Locked();
};

using Receiver = void (*)(const char* kind, const char* detail);
void set_receiver(Receiver receiver);
// Kinds: "race", "reused", "unlanded", "overwritten", "nccl" are faults; "wait": the host waited for the device.
void report(const char* kind, const std::string& detail);

int device_count();
int current_device();
void set_current_device(int device);
int resolved(int device);  // of -1: the current device

// Streams are known by their index, the same on every thread; all of these are called with the lock.
Stream& stream(int index);
int stream_count();
int stream_index(int device, int64_t id);
int64_t new_stream(int device);
int64_t current_stream_id(int device);
void set_current_stream(int device, int64_t id);
int current_stream(int device = -1);

uint64_t begin(int stream);  // an operation, after all that its stream and the host have waited for; returns its time
// One operation more. While it lives the profiler has a label for it, which profiling.py makes a kernel of the device.
struct Launched {
  explicit Launched(const std::string& name);
  at::RecordFunction label;
};
// Keep a device busy from now on for so many nanoseconds more, as torch.cuda._sleep does: who waits for it sleeps.
void spin(int device, int64_t nanoseconds);
bool is_busy(int device);
uint64_t operations();    // how many so far; a foreach is one, whatever it is over
const Clock& host();
void host_waits(const Clock& clock);  // and copies that are over land
void host_waits(int stream, const std::string& reason);
void host_waits_for_all(const std::string& reason);
void host_waits_for_event(const Clock& clock);

}  // namespace emulated
