// What torch asks a CUDA device for: guards, streams, events, generators, and the hooks of ATen.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <ctime>

#include "generators.h"
#include "memory.h"
#include "pinned.h"

namespace emulated {

static c10::Device cuda(int device) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(device)}; }
static c10::Stream torch_stream(int device, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, cuda(device), id); }
static int index_of(const c10::Stream& s) { return stream_index(s.device_index(), s.id()); }
static double seconds() { return static_cast<double>(clock()) / CLOCKS_PER_SEC; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::kCUDA;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::Device getDevice() const override { return cuda(current_device()); }
  void setDevice(c10::Device d) const override { set_current_device(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { set_current_device(d.index()); }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    setDevice(d);
    return old;
  }

  c10::Stream getStream(c10::Device d) const override { return torch_stream(resolved(d.index()), current_stream_id(d.index())); }
  c10::Stream getDefaultStream(c10::Device d) const override { return torch_stream(resolved(d.index()), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    Locked locked;
    return torch_stream(resolved(d.index()), new_stream(resolved(d.index())));
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    set_current_stream(s.device_index(), s.id());
    return old;
  }
  // Who sees that a stream is done knows as much as who waited for it, but has not waited.
  bool queryStream(const c10::Stream& s) const override {
    if (is_busy(s.device_index())) return false;
    Locked locked;
    host_waits(stream(index_of(s)).clock);
    return true;
  }
  void synchronizeStream(const c10::Stream& s) const override { host_waits(index_of(s), "Stream.synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { host_waits_for_all("torch.cuda.synchronize"); }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    Locked locked;
    if (!*event) *event = new Event();
    begin(index_of(s));
    *static_cast<Event*>(*event) = {stream(index_of(s)).clock, seconds()};
  }
  void block(void* event, const c10::Stream& s) const override {
    Locked locked;
    if (event) join(stream(index_of(s)).clock, static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    Locked locked;
    if (event) host_waits(static_cast<Event*>(event)->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    host_waits_for_event(event ? static_cast<Event*>(event)->clock : Clock());
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    return (static_cast<Event*>(b)->seconds - static_cast<Event*>(a)->seconds) * 1000;
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream&) const override { record_stream(pointer); }
};

// Of a device to all who ask; the numbers are those of a generator of the CPU.
struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator inner;
  DeviceGenerator(int device, at::Generator made)
      : GeneratorImpl(cuda(device), c10::DispatchKeySet(c10::DispatchKey::CUDA)), inner(std::move(made)) {}
  c10::GeneratorImpl* host() const { return inner.unsafeGetGeneratorImpl(); }
  void set_current_seed(uint64_t seed) override { host()->set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host()->set_offset(offset); }
  uint64_t get_offset() const override { return host()->get_offset(); }
  uint64_t current_seed() const override { return host()->current_seed(); }
  uint64_t seed() override { return host()->seed(); }
  void set_state(const c10::TensorImpl& state) override { host()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new DeviceGenerator(device_.index(), inner.clone()); }
};

const at::Generator& on_host(const at::Generator& given) {
  auto* own = dynamic_cast<DeviceGenerator*>(given.unsafeGetGeneratorImpl());
  TORCH_CHECK(own, "Expected a 'cuda' device type for generator but found '", given.device().type(), "'");
  return own->inner;
}

const at::Generator& generator(int device) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < 8; ++i) made.push_back(at::make_generator<DeviceGenerator>(i, at::detail::createCPUGenerator(1234)));
    return made;
  }();
  return all[resolved(device)];
}

static bool gives_default_generators = false;
void give_default_generators(bool on) { gives_default_generators = on; }

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::DeviceIndex current_device() const override { return static_cast<c10::DeviceIndex>(emulated::current_device()); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_current_device(d); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    auto old = current_device();
    set_current_device(d);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return generator(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override {
    if (gives_default_generators) return generator(d);
    return at::make_generator<DeviceGenerator>(resolved(d), at::detail::createCPUGenerator());
  }
  at::Device getDeviceFromPtr(void* pointer) const override { return cuda(resolved(device_of(pointer))); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator(); }
  void deviceSynchronize(c10::DeviceIndex) const override { host_waits_for_all("torch.cuda.synchronize"); }
};

}  // namespace emulated

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, emulated::Guard);
}
namespace at {
using CUDAHooks = emulated::Hooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
