// The C interface. Every kernel file is compiled once for each instruction set with MARLHF_ISA set to its name, which
// all that the file defines carries: the namespace marlhf::MARLHF_ISA, and the exported functions by MARLHF_FUNCTION.

#pragma once

#include <cstdint>

#define MARLHF_EXPORT extern "C" __attribute__((visibility("default")))

#define MARLHF_JOIN_NAMES(isa, name) marlhf_##isa##_##name
#define MARLHF_JOIN(isa, name) MARLHF_JOIN_NAMES(isa, name)
// MARLHF_FUNCTION(scale)(float* x, std::int64_t count) { ...; return 0; } is `scale` to the loader. The int it returns
// is 0, or says what is wrong with the content of the tensors.
#define MARLHF_FUNCTION(name) MARLHF_EXPORT int MARLHF_JOIN(MARLHF_ISA, name)

// Element types as the loader numbers them.
enum Type : int { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT32 = 3, INT64 = 4 };
