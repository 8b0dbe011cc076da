#include "memory.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace marlhf {

// A large tensor fresh from the system costs a fault for each page that is first written, several times the time of
// the writing; with pages of 2 MiB there are 512 times fewer. Only advice: where it cannot be taken nothing changes.
void use_huge_pages(void* begin, std::int64_t bytes) {
#ifdef MADV_HUGEPAGE
    constexpr std::uintptr_t page = std::uintptr_t{1} << 21;
    const auto address = reinterpret_cast<std::uintptr_t>(begin);
    const std::uintptr_t first = (address + page - 1) / page * page, last = (address + bytes) / page * page;
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
    (void)begin;
    (void)bytes;
#endif
}

}  // namespace marlhf
