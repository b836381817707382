#include "pinned.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>

namespace emulated {

struct Copy {
  uintptr_t begin, end;  // on the host
  int stream;
  uint64_t time;
  bool is_to_host;
  std::vector<char> data;   // of a copy to the host
  bool is_exposed = false;  // somebody came before it was over: its pages stay open
  bool meets(uintptr_t from, uintptr_t to) const { return begin < to && from < end; }
};

static std::map<uintptr_t, size_t> pinned;  // bytes, whole pages
static std::list<Copy> copies;

static uintptr_t page_size() {
  static const auto size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  return size;
}
static uintptr_t floor_page(uintptr_t address) { return address / page_size() * page_size(); }
static uintptr_t ceil_page(uintptr_t address) { return floor_page(address + page_size() - 1); }

static bool contains(uintptr_t address) {
  auto after = pinned.upper_bound(address);
  return after != pinned.begin() && address < std::prev(after)->first + std::prev(after)->second;
}

static void open_pages(uintptr_t from, uintptr_t to) {
  mprotect(reinterpret_cast<void*>(floor_page(from)), ceil_page(to) - floor_page(from), PROT_READ | PROT_WRITE);
}

static void on_fault(int, siginfo_t*, void*);
static struct sigaction previous;

// Anew before pages are closed: faulthandler puts its own handler before ours when it is enabled.
static void install_handler() {
  struct sigaction now;
  sigaction(SIGSEGV, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == &on_fault) return;
  previous = now;
  struct sigaction ours {};
  ours.sa_sigaction = &on_fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGSEGV, &ours, nullptr);
}

// The copies that are left decide what is closed of the pages of some bytes.
static void close_pages(uintptr_t from, uintptr_t to) {
  install_handler();
  for (auto page = floor_page(from); page < to; page += page_size()) {
    int access = PROT_READ | PROT_WRITE;
    for (auto& copy : copies)
      if (!copy.is_exposed && copy.meets(page, page + page_size())) access &= copy.is_to_host ? PROT_NONE : PROT_READ;
    if (access != (PROT_READ | PROT_WRITE)) mprotect(reinterpret_cast<void*>(page), page_size(), access);
  }
}

static std::list<Copy>::iterator finish(std::list<Copy>::iterator at) {
  const Copy copy = std::move(*at);
  at = copies.erase(at);
  open_pages(copy.begin, copy.end);
  if (copy.is_to_host) memcpy(reinterpret_cast<void*>(copy.begin), copy.data.data(), copy.data.size());
  close_pages(copy.begin, copy.end);
  return at;
}

// A read or write of a closed page: report it, leave the page open, and let the instruction run again.
static void on_fault(int signal, siginfo_t* information, void*) {
  const auto address = reinterpret_cast<uintptr_t>(information->si_addr);
  Locked locked;
  if (information->si_code == SI_TKILL) return;  // by faulthandler, which has seen ours: the access itself comes again
  if (information->si_code <= 0) {  // sent by somebody, who means it
    ::signal(signal, SIG_DFL);
    kill(getpid(), signal);
    return;
  }
  if (!contains(address)) {
    sigaction(signal, &previous, nullptr);
    return;
  }
  const auto page = floor_page(address);
  for (auto& copy : copies) {
    if (copy.is_exposed || !copy.meets(page, page + page_size())) continue;
    if (copy.meets(address, address + 1)) {
      const auto bytes = std::to_string(copy.end - copy.begin) + " bytes";
      if (copy.is_to_host) report("unlanded", "the host touches " + bytes + " before their copy from the device is over");
      else report("overwritten", "the host writes " + bytes + " while their copy to the device reads them");
    }
    copy.is_exposed = true;
    open_pages(copy.begin, copy.end);
  }
  open_pages(page, page + 1);
}

void copy_to_host_later(void* to, const void* from, size_t bytes, int s, uint64_t time) {
  auto begin = reinterpret_cast<uintptr_t>(to);
  auto* data = static_cast<const char*>(from);
  copies.push_back(Copy{begin, begin + bytes, s, time, true, std::vector<char>(data, data + bytes)});
  close_pages(begin, begin + bytes);
}

void copy_to_device_reads(const void* from, size_t bytes, int s, uint64_t time) {
  auto begin = reinterpret_cast<uintptr_t>(from);
  copies.push_back(Copy{begin, begin + bytes, s, time, false, {}});
  close_pages(begin, begin + bytes);
}

void land_what_is_over() {
  for (auto at = copies.begin(); at != copies.end();) at = covers(host(), at->stream, at->time) ? finish(at) : std::next(at);
}

void device_reads(const void* from, size_t bytes, int s) {
  auto begin = reinterpret_cast<uintptr_t>(from);
  for (auto at = copies.begin(); at != copies.end();) {
    if (!at->is_to_host || !at->meets(begin, begin + bytes)) {
      ++at;
      continue;
    }
    if (!covers(stream(s).clock, at->stream, at->time))
      report("race", "a copy to the device reads on stream " + std::to_string(s) + " what a copy from it still writes");
    at = finish(at);
  }
}

static void unpin(void* pointer) {
  Locked locked;
  auto begin = reinterpret_cast<uintptr_t>(pointer);
  const auto size = pinned[begin];
  for (auto at = copies.begin(); at != copies.end();) at = at->meets(begin, begin + size) ? finish(at) : std::next(at);
  pinned.erase(begin);
  free(pointer);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Locked locked;
    void* pointer = nullptr;
    const auto size = ceil_page(bytes);
    if (bytes && posix_memalign(&pointer, page_size(), size)) throw std::bad_alloc();
    if (pointer) {
      pinned[reinterpret_cast<uintptr_t>(pointer)] = size;
      memset(pointer, 0x7F, size);  // a large number: what is read before it is written shows
    }
    return {pointer, pointer, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
};

c10::Allocator& pinned_allocator() {
  static PinnedAllocator allocator;
  return allocator;
}

bool is_pinned(const void* pointer) {
  Locked locked;
  return contains(reinterpret_cast<uintptr_t>(pointer));
}

}  // namespace emulated
