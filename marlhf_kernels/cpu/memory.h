// Memory that is about to be written for the first time.

#pragma once

#include <cstdint>

namespace marlhf {

void use_huge_pages(void* begin, std::int64_t bytes);

}  // namespace marlhf
