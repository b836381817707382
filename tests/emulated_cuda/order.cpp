#include "order.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "pinned.h"

namespace emulated {

void join(Clock& into, const Clock& other) {
  if (other.size() > into.size()) into.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

bool covers(const Clock& clock, int stream, uint64_t time) {
  return static_cast<size_t>(stream) < clock.size() && clock[stream] >= time;
}

// The lock, and the reports that wait for its end.

static std::recursive_mutex mutex;
static Receiver receiver = nullptr;
static thread_local int depth = 0;
static thread_local std::vector<std::pair<const char*, std::string>> undelivered;

Locked::Locked() {
  mutex.lock();
  ++depth;
}

Locked::~Locked() {
  --depth;
  mutex.unlock();
  if (depth || undelivered.empty()) return;
  auto reports = std::move(undelivered);
  undelivered.clear();
  for (auto& [kind, detail] : reports)
    if (receiver) receiver(kind, detail.c_str());
}

void set_receiver(Receiver given) { receiver = given; }

void report(const char* kind, const std::string& detail) {
  if (depth) undelivered.emplace_back(kind, detail);
  else if (receiver) receiver(kind, detail.c_str());
}

// Devices. Their number is read from the environment each time: forks of one process may have different numbers.

static thread_local int device = 0;
static thread_local std::unordered_map<int, int64_t> current;  // stream by device

int device_count() {
  const char* text = getenv("EMULATED_CUDA_DEVICES");
  return std::clamp(text ? atoi(text) : 8, 0, 8);
}

int current_device() { return device; }
void set_current_device(int given) {
  if (given >= 0) device = given;
}
int resolved(int given) { return given < 0 ? device : given; }

// Streams

static std::deque<Stream> streams;
static std::map<std::pair<int, int64_t>, int> indices;
static Clock host_clock;
static int64_t next_id = 1;
static std::atomic<uint64_t> count = 0;

Stream& stream(int index) { return streams[index]; }
int stream_count() { return static_cast<int>(streams.size()); }

int stream_index(int device, int64_t id) {
  auto [entry, is_new] = indices.try_emplace({device, id}, stream_count());
  if (is_new) streams.push_back(Stream{device, id});
  return entry->second;
}

int64_t new_stream(int device) {
  stream_index(device, next_id);
  return next_id++;
}

int64_t current_stream_id(int device) {
  auto entry = current.find(resolved(device));
  return entry == current.end() ? 0 : entry->second;
}
void set_current_stream(int device, int64_t id) { current[resolved(device)] = id; }
int current_stream(int device) { return stream_index(resolved(device), current_stream_id(device)); }

uint64_t begin(int index) {
  Stream& s = streams[index];
  join(s.clock, host_clock);  // the host launches it: all that the host has waited for is over
  if (s.clock.size() <= static_cast<size_t>(index)) s.clock.resize(index + 1, 0);
  return s.clock[index] = ++s.time;
}

static void labelled(at::RecordFunction& label, const std::string& name) {
  if (label.isActive()) label.before(name);
}

Launched::Launched(const std::string& name) : label(at::RecordScope::FUNCTION) {
  ++count;
  labelled(label, "emulated kernel " + name);
}

uint64_t operations() { return count; }

static std::atomic<int64_t> busy_until[8];

static int64_t now() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }
void spin(int device, int64_t nanoseconds) { busy_until[device] = std::max(now(), busy_until[device].load()) + nanoseconds; }
bool is_busy(int device) { return now() < busy_until[device]; }
static void sleep_while_busy(int device) {
  while (is_busy(device)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}
const Clock& host() { return host_clock; }

void host_waits(const Clock& clock) {
  join(host_clock, clock);
  land_what_is_over();
}

void host_waits(int index, const std::string& reason) {
  at::RecordFunction label(at::RecordScope::FUNCTION);
  labelled(label, "cudaStreamSynchronize");
  Locked locked;
  sleep_while_busy(streams[index].device);
  host_waits(streams[index].clock);
  report("wait", reason);
}

void host_waits_for_all(const std::string& reason) {
  at::RecordFunction label(at::RecordScope::FUNCTION);
  labelled(label, "cudaDeviceSynchronize");
  sleep_while_busy(device);
  Locked locked;
  for (auto& s : streams) join(host_clock, s.clock);
  land_what_is_over();
  report("wait", reason);
}

void host_waits_for_event(const Clock& clock) {
  at::RecordFunction label(at::RecordScope::FUNCTION);
  labelled(label, "cudaEventSynchronize");
  sleep_while_busy(device);
  Locked locked;
  host_waits(clock);
  report("wait", "Event.synchronize");
}

}  // namespace emulated
