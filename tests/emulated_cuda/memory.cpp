#include "memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

namespace emulated {

struct Access {
  uintptr_t begin, end;
  int stream;
  uint64_t time;
  bool is_write;
  std::string operation;
  uint64_t life;  // of the block, then
};

struct Block {
  uintptr_t start;
  size_t size;
  int stream;                // that it belongs to: free, it serves this one again, without waiting
  uint64_t life = 0;         // how often it has been given out
  bool is_recorded = false;  // on other streams
  std::vector<Access> accesses{};
};

constexpr size_t ALIGNMENT = 512;
constexpr size_t REMEMBERED = 256;  // accesses of a block

static std::map<uintptr_t, Block> blocks;
static std::map<std::pair<int, size_t>, std::vector<Block*>> free_blocks;  // by stream and size
static Usage usage[8];                                                   // by device

static Block* block_at(uintptr_t address) {
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return nullptr;
  Block& block = std::prev(after)->second;
  return address < block.start + block.size ? &block : nullptr;
}

static std::string described(const Access& a) {
  return a.operation + (a.is_write ? " wrote" : " read") + " on stream " + std::to_string(a.stream);
}

void access(int s, uint64_t time, const void* start, size_t bytes, bool is_write, const std::string& operation) {
  auto begin = reinterpret_cast<uintptr_t>(start);
  Block* block = bytes ? block_at(begin) : nullptr;
  if (!block) return;
  const Access now{begin, begin + bytes, s, time, is_write, operation, block->life};
  std::vector<Access> kept;
  for (auto& before : block->accesses) {
    const bool is_reuse = before.life != block->life;
    const bool meets = is_reuse || (before.begin < now.end && now.begin < before.end);
    const bool is_ordered = before.stream == s || covers(stream(s).clock, before.stream, before.time);
    if (meets && (is_write || before.is_write) && !is_ordered)
      report(is_reuse ? "reused" : "race", operation + (is_write ? " writes " : " reads ") + std::to_string(bytes) +
                                               " bytes on stream " + std::to_string(s) + "; nothing orders it after " +
                                               described(before) + (is_reuse ? ", when something else lay there" : ""));
    const bool is_replaced = is_write && before.begin >= now.begin && before.end <= now.end;
    if (!(is_ordered && (is_replaced || is_reuse))) kept.push_back(before);
  }
  if (kept.size() >= REMEMBERED) kept.erase(kept.begin(), kept.begin() + REMEMBERED / 2);
  kept.push_back(now);
  block->accesses.swap(kept);
}

static void give(void* pointer) {
  Locked locked;
  auto entry = blocks.find(reinterpret_cast<uintptr_t>(pointer));
  if (entry == blocks.end()) return;
  Block& block = entry->second;
  usage[stream(block.stream).device].allocated -= block.size;
  if (block.is_recorded) block.accesses.clear();  // the real allocator waits for the streams that were recorded
  free_blocks[{block.stream, block.size}].push_back(&block);
}

size_t memory_of_device() {
  const char* text = getenv("EMULATED_CUDA_MEMORY");
  return text ? std::strtoull(text, nullptr, 10) : 79ull << 30;
}

void empty_cache(int device) {
  Locked locked;
  for (auto entry = free_blocks.begin(); entry != free_blocks.end();) {
    if (stream(entry->first.first).device != device) {
      ++entry;
      continue;
    }
    for (Block* block : entry->second) {
      usage[device].reserved -= block->size;
      free(reinterpret_cast<void*>(block->start));
      blocks.erase(block->start);
    }
    entry = free_blocks.erase(entry);
  }
}

static std::string in_words(size_t bytes) {
  char text[32];
  const double size = static_cast<double>(bytes);
  if (bytes < 1 << 20) snprintf(text, sizeof text, "%.2f KiB", size / (1 << 10));
  else if (bytes < 1 << 30) snprintf(text, sizeof text, "%.2f MiB", size / (1 << 20));
  else snprintf(text, sizeof text, "%.2f GiB", size / (1 << 30));
  return text;
}

// As the real allocator: what it keeps is given back before it refuses.
static void make_room(size_t size, int device) {
  const size_t total = memory_of_device();
  if (usage[device].reserved + size > total) empty_cache(device);
  const auto& [allocated, peak, reserved, peak_reserved] = usage[device];
  TORCH_CHECK_WITH(OutOfMemoryError, reserved + size <= total, "CUDA out of memory. Tried to allocate ", in_words(size), ". GPU ",
                   device, " has a total capacity of ", in_words(total), " of which ", in_words(total - reserved),
                   " is free. Of the allocated memory ", in_words(allocated), " is allocated by PyTorch (emulated CUDA)");
}

static void* take(size_t bytes, int device) {
  Locked locked;
  const size_t size = std::max<size_t>((bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, ALIGNMENT);
  const int s = current_stream(device);
  auto& use = usage[device];
  if (free_blocks[{s, size}].empty()) make_room(size, device);
  auto& list = free_blocks[{s, size}];
  Block* block;
  if (list.empty()) {
    void* pointer = nullptr;
    if (posix_memalign(&pointer, ALIGNMENT, size)) throw std::bad_alloc();
    auto start = reinterpret_cast<uintptr_t>(pointer);
    block = &blocks.emplace(start, Block{start, size, s}).first->second;
    use.reserved += size;
    use.peak_reserved = std::max(use.peak_reserved, use.reserved);
  } else {
    block = list.back();
    list.pop_back();
    block->life++;
    block->is_recorded = false;
  }
  use.allocated += size;
  use.peak = std::max(use.peak, use.allocated);
  auto* pointer = reinterpret_cast<void*>(block->start);
  memset(pointer, 0xFF, size);  // not a number, of every dtype of floats: what is read before it is written shows
  return pointer;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    void* pointer = bytes ? take(bytes, device) : nullptr;
    return {pointer, pointer, &give, c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
};

c10::Allocator& device_allocator() {
  static DeviceAllocator allocator;
  return allocator;
}

int device_of(const void* pointer) {
  Locked locked;
  Block* block = block_at(reinterpret_cast<uintptr_t>(pointer));
  return block ? stream(block->stream).device : -1;
}

void record_stream(const c10::DataPtr& pointer) {
  Locked locked;
  auto entry = blocks.find(reinterpret_cast<uintptr_t>(pointer.get()));
  // The real allocator, too, ignores memory that it does not free itself.
  if (pointer.get_deleter() == &give && entry != blocks.end()) entry->second.is_recorded = true;
}

Usage usage_of(int device) { return usage[device]; }
void reset_peak(int device) {
  usage[device].peak = usage[device].allocated;
  usage[device].peak_reserved = usage[device].reserved;
}

static at::AllocatorRegisterer<c10::DeviceType::CUDA> registered(&device_allocator());

}  // namespace emulated
