// Emulated CUDA device for the CPU build of torch. Tensors have the device type and index of CUDA, their memory is the host's, and the
// CPU kernels compute. Registers a device guard, CUDA hooks, an allocator, pinned memory and a fallback of the CUDA dispatch key.
// Operators that mix devices raise as on CUDA. Operations for which the host would wait are reported to `on_wait`.
#include "operators.h"

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}
static bool registered = [] {
  c10::SetAllocator(CUDA, &device_memory, 255);
  return true;
}();

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &_copy_from);
  m.impl("_copy_from_and_resize", &_copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("view", &view);
  m.impl("as_strided", &as_strided);
  m.impl("_reshape_alias", &_reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_);
}
TORCH_LIBRARY(emulated_cuda, m) { m.def("host_alias(Tensor(a) t) -> Tensor(a)"); }
TORCH_LIBRARY_IMPL(emulated_cuda, CUDA, m) { m.impl("host_alias", &host_alias); }
TORCH_LIBRARY_IMPL(emulated_cuda, CPU, m) { m.impl("host_alias", &host_alias); }

extern "C" {
int64_t emulated_live_bytes() { return live_bytes; }
int64_t emulated_peak_bytes() { return peak_bytes; }
void emulated_reset_peak() { peak_bytes = live_bytes.load(); }
int emulated_current_device() { return current; }
void emulated_set_device(int index) { current = index; }
void emulated_set_device_count(int count) { num_devices = count; }
void emulated_set_on_wait(void (*callback)(const char*)) { on_wait = callback; }
void emulated_pin(uintptr_t start, uintptr_t size) {
  std::lock_guard<std::mutex> hold(lock);
  pinned_ranges[start] = start + size;
}
void emulated_unpin(uintptr_t start) {
  std::lock_guard<std::mutex> hold(lock);
  pinned_ranges.erase(start);
}
int emulated_use_pool(int pool) { return std::exchange(current_pool, pool); }
int64_t emulated_pool_bytes(int pool) {
  std::lock_guard<std::mutex> hold(lock);
  int64_t sum = 0;
  for (auto& [start, block] : device_blocks) if (block.pool == pool && !block.asleep) sum += block.size;
  return sum;
}
void emulated_sleep_pool(int pool, bool backup) {
  std::lock_guard<std::mutex> hold(lock);
  for (auto& [start, block] : device_blocks) {
    if (block.pool != pool || block.asleep) continue;
    auto* bytes = static_cast<char*>(start);
    if (backup) block.backup.assign(bytes, bytes + block.size);
    block.asleep = true;
    live_bytes -= block.size;
    std::memset(start, 0x7f, block.size);
  }
}
void emulated_wake_pool(int pool) {
  std::lock_guard<std::mutex> hold(lock);
  for (auto& [start, block] : device_blocks) {
    if (block.pool != pool || !block.asleep) continue;
    block.asleep = false;
    live_bytes += block.size;
    std::memset(start, 0x7f, block.size);  // what was written meanwhile is lost
    if (!block.backup.empty()) std::memcpy(start, block.backup.data(), block.size);
    block.backup.clear();
  }
}
void emulated_resize_storage(void* storage, uint64_t size) { resize_storage(reinterpret_cast<c10::StorageImpl*>(storage), size); }
}
