// Device guard, allocators, pinned memory and CUDA hooks of the emulated device.
#pragma once
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {
constexpr c10::DeviceType CUDA = c10::DeviceType::CUDA;
constexpr size_t BLOCK = 512;  // the caching allocator of CUDA rounds sizes up to a multiple of this
int num_devices = 1;
thread_local c10::DeviceIndex current = 0;
std::atomic<int64_t> live_bytes{0}, peak_bytes{0}, next_stream{1};
std::mutex lock;
// A block of device memory. Those of a pool can sleep: their content is lost, unless a backup exists, and they take no memory.
struct Block {
  size_t size;
  int pool;
  bool asleep = false;
  std::vector<char> backup;
};
std::unordered_map<void*, Block> device_blocks;
thread_local int current_pool = 0;  // 0 is the memory outside of all pools
std::unordered_set<const void*> device_generators;
std::map<uintptr_t, uintptr_t> pinned_ranges;  // start -> end
void (*on_wait)(const char*) = nullptr;

void wait(const char* operation) {
  if (on_wait) on_wait(operation);
}

c10::Device with_index(c10::Device device) {
  return c10::Device{CUDA, device.has_index() ? device.index() : current};
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = CUDA;
  c10::DeviceType type() const override { return CUDA; }
  c10::Device getDevice() const override { return {CUDA, current}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices; }
  c10::Stream getStream(c10::Device device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, with_index(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, with_index(device), next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return getStream(stream.device()); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait("synchronize stream"); }
  void synchronizeEvent(void*) const override { wait("synchronize event"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait("synchronize device"); }
};

struct Memory final : c10::Allocator {
  bool is_device;
  explicit Memory(bool is_device) : is_device(is_device) {}
  static void free_device(void* start) {
    std::lock_guard<std::mutex> hold(lock);
    auto found = device_blocks.find(start);
    if (found != device_blocks.end()) {
      if (!found->second.asleep) live_bytes -= found->second.size;
      device_blocks.erase(found);
    }
    std::free(start);
  }
  static void free_pinned(void* start) {
    std::lock_guard<std::mutex> hold(lock);
    pinned_ranges.erase(reinterpret_cast<uintptr_t>(start));
    std::free(start);
  }
  c10::DeleterFnPtr raw_deleter() const override { return is_device ? &free_device : &free_pinned; }
  c10::DataPtr allocate(size_t size) override {
    auto device = is_device ? c10::Device{CUDA, current} : c10::Device{c10::kCPU};
    if (size == 0) return {nullptr, nullptr, raw_deleter(), device};
    void* start = nullptr;
    size = (size + BLOCK - 1) / BLOCK * BLOCK;
    TORCH_CHECK(posix_memalign(&start, BLOCK, size) == 0, "out of memory of the emulated device");
    std::memset(start, 0x7f, size);  // memory that nobody writes reads as 3.4e38 in float32 and bfloat16
    std::lock_guard<std::mutex> hold(lock);
    if (is_device) {
      device_blocks[start] = {size, current_pool};
      live_bytes += size;
      peak_bytes = std::max(peak_bytes.load(), live_bytes.load());
    } else {
      pinned_ranges[reinterpret_cast<uintptr_t>(start)] = reinterpret_cast<uintptr_t>(start) + size;
    }
    return {start, start, raw_deleter(), device};
  }
  void copy_data(void* target, const void* source, std::size_t count) const override { std::memcpy(target, source, count); }
};
Memory device_memory{true}, pinned_memory{false};

bool is_pinned(const void* pointer) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> hold(lock);
  auto after = pinned_ranges.upper_bound(address);
  return after != pinned_ranges.begin() && address < std::prev(after)->second;
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices; }
  int getNumGPUs() const override { return num_devices; }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  c10::Device getDeviceFromPtr(void*) const override { return {CUDA, current}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    auto made = at::detail::createCPUGenerator();
    device_generators.insert(made.unsafeGetGeneratorImpl());
    return made;
  }
  void deviceSynchronize(c10::DeviceIndex) const override { wait("synchronize device"); }
};

// Makes a device current for as long as this object lives.
struct OnDevice {
  c10::DeviceIndex before = current;
  explicit OnDevice(c10::Device device) { current = device.index(); }
  ~OnDevice() { current = before; }
};

c10::Device checked_device(std::optional<c10::Device> given) {
  auto device = with_index(given.value_or(c10::Device{CUDA}));
  TORCH_CHECK(given.value_or(device).type() == CUDA && device.index() < num_devices, "CUDA error: invalid device ordinal ", device);
  return device;
}
}  // namespace
