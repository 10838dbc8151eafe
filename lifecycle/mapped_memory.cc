#include "lifecycle/mapped_memory.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace loadplan {
namespace {

// Asks for no write and waits for none: ENOMEM says that some page is not mapped.
bool IsMappedOnHost(std::uintptr_t address, std::size_t nbytes) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t start = address / page * page;
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  return msync(reinterpret_cast<void*>(start), address + nbytes - start, MS_ASYNC) == 0 ||
         errno != ENOMEM;
}

// The driver is there where torch has a CUDA tensor; nothing is linked for it.
bool IsMappedOnGpu(std::uintptr_t address) {
  using GetAttribute = int (*)(void* data, int attribute, unsigned long long pointer);
  constexpr int kMapped = 13;  // CU_POINTER_ATTRIBUTE_MAPPED
  static const auto get_attribute = [] {
    void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    void* const found = driver == nullptr ? nullptr : dlsym(driver, "cuPointerGetAttribute");
    return reinterpret_cast<GetAttribute>(found);
  }();
  int is_mapped = 1;
  if (get_attribute == nullptr || get_attribute(&is_mapped, kMapped, address) != 0) return true;
  return is_mapped != 0;
}

}  // namespace

bool IsMapped(const at::Tensor& tensor) {
  const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  if (storage->nbytes() == 0 || !(tensor.is_cpu() || tensor.is_cuda())) return true;
  // Not data_ptr(), which raises for storages that hold no memory.
  const auto address = reinterpret_cast<std::uintptr_t>(
      const_cast<c10::StorageImpl*>(storage)->_mutable_data_ptr_no_checks().get());
  if (address == 0) return false;
  if (tensor.is_cpu()) return IsMappedOnHost(address, storage->nbytes());
  return IsMappedOnGpu(address) && IsMappedOnGpu(address + storage->nbytes() - 1);
}

}  // namespace loadplan
