// NoMemory: while one lives, tensors on the CPU get no memory.
#ifndef LOADPLAN_TESTS_LIFECYCLE_NO_MEMORY_H_
#define LOADPLAN_TESTS_LIFECYCLE_NO_MEMORY_H_

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>

namespace loadplan::testing {

class NoMemory {
 public:
  NoMemory() { c10::SetCPUAllocator(&refusing_, kPriority); }
  ~NoMemory() { c10::SetCPUAllocator(before_, kPriority); }
  NoMemory(const NoMemory&) = delete;
  NoMemory& operator=(const NoMemory&) = delete;

 private:
  struct Refusing final : c10::Allocator {
    c10::DataPtr allocate(std::size_t nbytes) override {
      TORCH_CHECK(false, "no memory for ", nbytes, " bytes");
    }
    void copy_data(void* to, const void* from, std::size_t count) const override {
      default_copy_data(to, from, count);
    }
  };

  static constexpr std::uint8_t kPriority = 100;
  c10::Allocator* const before_ = c10::GetCPUAllocator();
  Refusing refusing_;
};

}  // namespace loadplan::testing

#endif  // LOADPLAN_TESTS_LIFECYCLE_NO_MEMORY_H_
