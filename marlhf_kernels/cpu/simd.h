// Vectors of LANES floats in the instruction set that the file is compiled for, written with the vector extensions of
// GCC and Clang; intrinsics only where those have no word for it.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace marlhf::MARLHF_ISA {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

#define MARLHF_INLINE static inline __attribute__((always_inline))

typedef float Float __attribute__((vector_size(4 * LANES)));
typedef std::int32_t Int __attribute__((vector_size(4 * LANES)));
typedef std::uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef std::uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct BFloat16 {
    std::uint16_t bits;
};
struct Float16 {
    std::uint16_t bits;
};

// x - 0 is x, -0 included.
MARLHF_INLINE Float broadcast(float x) { return x - Float{}; }

// a * b + c with one rounding where the processor can.
MARLHF_INLINE Float fma(Float a, Float b, Float c) {
#if defined(__AVX512F__)
    return (Float)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Float)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Float)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// The larger one; a NaN in `x` stays.
MARLHF_INLINE Float max(Float floor, Float x) {
#if defined(__AVX512F__)
    return (Float)_mm512_max_ps((__m512)floor, (__m512)x);
#elif defined(__AVX2__)
    return (Float)_mm256_max_ps((__m256)floor, (__m256)x);
#elif defined(__SSE2__)
    return (Float)_mm_max_ps((__m128)floor, (__m128)x);
#elif defined(__aarch64__)
    return (Float)vmaxq_f32((float32x4_t)floor, (float32x4_t)x);
#else
    return floor > x ? floor : x;
#endif
}

MARLHF_INLINE Float absolute(Float x) { return (Float)((Bits)x & 0x7fffffffu); }

MARLHF_INLINE Float copy_sign(Float magnitude, Float sign) {
    return (Float)(((Bits)magnitude & 0x7fffffffu) | ((Bits)sign & 0x80000000u));
}

// True in the first `count` lanes.
MARLHF_INLINE Int first_lanes(int count) {
    Int lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    return lane < count;
}

// GCC 12 widens and narrows by way of shuffles where one instruction does.
MARLHF_INLINE Bits widen(Halves halves) {
#if defined(__AVX512F__)
    return (Bits)_mm512_cvtepu16_epi32((__m256i)halves);
#elif defined(__AVX2__)
    return (Bits)_mm256_cvtepu16_epi32((__m128i)halves);
#else
    return __builtin_convertvector(halves, Bits);
#endif
}

// The upper half of every lane is 0.
MARLHF_INLINE Halves narrow(Bits bits) {
#if defined(__AVX512F__)
    return (Halves)_mm512_cvtepi32_epi16((__m512i)bits);
#elif defined(__AVX2__)
    return (Halves)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)bits), _mm256_extracti128_si256((__m256i)bits, 1));
#else
    return __builtin_convertvector(bits, Halves);
#endif
}

MARLHF_INLINE Halves load_halves(const void* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return halves;
}

MARLHF_INLINE Float load(const float* from) {
    Float x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

MARLHF_INLINE Float load(const BFloat16* from) { return (Float)(widen(load_halves(from)) << 16); }

MARLHF_INLINE Float load(const Float16* from) {
#if defined(__AVX512F__)
    return (Float)_mm512_cvtph_ps((__m256i)load_halves(from));
#elif defined(__F16C__)
    return (Float)_mm256_cvtph_ps((__m128i)load_halves(from));
#elif defined(__aarch64__)
    return (Float)vcvt_f32_f16((float16x4_t)load_halves(from));
#else
    const Bits half = widen(load_halves(from));
    const Bits magnitude = half & 0x7fff;
    // The exponent's bias differs by 112, also for subnormal numbers; infinity and NaN keep the largest exponent.
    const Bits scaled = (Bits)((Float)(magnitude << 13) * 0x1p112f);
    const Bits special = (Bits)(magnitude >= 0x7c00) & 0x7f800000;
    return (Float)(scaled | special | (half & 0x8000) << 16);
#endif
}

MARLHF_INLINE void store(float* to, Float x) { std::memcpy(to, &x, sizeof x); }

// The number nearest to x, ties to even, in the upper half of each lane; the lower half is anything.
MARLHF_INLINE Bits round_to_bfloat16(Float x) {
    const Bits bits = (Bits)x;
    return (Bits)(x == x ? (Int)(bits + 0x7fff + (bits >> 16 & 1)) : (Int)(bits | 0x400000));
}

MARLHF_INLINE void store(BFloat16* to, Float x) {
    const Halves halves = narrow(round_to_bfloat16(x) >> 16);
    std::memcpy(to, &halves, sizeof halves);
}

MARLHF_INLINE void store(Float16* to, Float x) {
#if defined(__AVX512F__)
    const auto halves = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
    const auto halves = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
    const auto halves = vcvt_f16_f32((float32x4_t)x);
#else
    const Float magnitude = absolute(x);
    const Bits bits = (Bits)magnitude;
    // Adding 0.5 leaves a subnormal half in the low bits, rounded by the addition.
    const Bits subnormal = (Bits)(magnitude + 0.5f) - 0x3f000000;
    const Bits normal = (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
    const Bits large = (Bits)(magnitude >= 65520.0f);
    Bits half = (Bits)(magnitude < 0x1p-14f ? (Int)subnormal : (Int)normal);
    half = (half & ~large) | (large & 0x7c00);
    half = (Bits)(x == x ? (Int)half : (Int)(half & 0) + 0x7e00);
    const Halves halves = narrow(half | ((Bits)x >> 16 & 0x8000));
#endif
    std::memcpy(to, &halves, sizeof halves);
}

// 2 LANES elements in an order of their own, which store_pair undoes.
struct Pair {
    Float part[2];
};

template <typename T>
MARLHF_INLINE Pair load_pair(const T* from) {
    return {load(from), load(from + LANES)};
}

template <typename T>
MARLHF_INLINE void store_pair(T* to, const Pair& pair) {
    store(to, pair.part[0]);
    store(to + LANES, pair.part[1]);
}

// The even and the odd elements: cheaper than to widen the halves in order.
MARLHF_INLINE Pair load_pair(const BFloat16* from) {
    Bits both;
    std::memcpy(&both, from, sizeof both);
    return {(Float)(both << 16), (Float)(both & 0xffff0000)};
}

MARLHF_INLINE void store_pair(BFloat16* to, const Pair& pair) {
    const Bits both = round_to_bfloat16(pair.part[0]) >> 16 | (round_to_bfloat16(pair.part[1]) & 0xffff0000);
    std::memcpy(to, &both, sizeof both);
}

// The first `count` < LANES elements; the other lanes hold 0.
template <typename T>
MARLHF_INLINE Float load_first(const T* from, int count) {
    T elements[LANES] = {};
    std::memcpy(elements, from, count * sizeof(T));
    return load(elements);
}

template <typename T>
MARLHF_INLINE void store_first(T* to, Float x, int count) {
    T elements[LANES];
    store(elements, x);
    std::memcpy(to, elements, count * sizeof(T));
}

template <typename T>
MARLHF_INLINE float load_one(const T* from) {
    return load_first(from, 1)[0];
}

template <typename T>
MARLHF_INLINE void store_one(T* to, float x) {
    store_first(to, broadcast(x), 1);
}

// The sum of the lanes, by halves.
MARLHF_INLINE float sum(Float x) {
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) x[i] += x[i + width];
    return x[0];
}

MARLHF_INLINE float largest(Float x) {
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) x[i] = x[i] < x[i + width] ? x[i + width] : x[i];
    return x[0];
}

// Below it exp2_above_floor is 0.
constexpr float EXP2_FLOOR = -127.0f;

// 2^y for y from EXP2_FLOOR, where it is exactly 0, to 127, and NaN for NaN; relative error 1.6e-7. The minimax
// polynomial is that of (2^f - 1) / f on [-0.5, 0.5].
MARLHF_INLINE Float exp2_above_floor(Float y) {
    // Adding it rounds y to an integer and leaves that integer's float exponent in the low bits.
    const float magic = 0x1.8p23f + 127.0f;
    const Float shifted = y + magic;
    const Float scale = (Float)((Bits)shifted << 23);
    const Float f = y - (shifted - magic);
    Float q = broadcast(0x1.5bba14p-10f);
    q = fma(q, f, broadcast(0x1.3cea88p-7f));
    q = fma(q, f, broadcast(0x1.c6b752p-5f));
    q = fma(q, f, broadcast(0x1.ebf9bcp-3f));
    q = fma(q, f, broadcast(0x1.62e42ap-1f));
    return fma(scale * f, q, scale);
}

// tanh: an odd minimax polynomial near 0, 1 - 2 / (e^2x + 1) beyond.
MARLHF_INLINE Float tanh(Float x) {
    const Float u = absolute(x);
    const Float s = u * u;
    Float p = broadcast(-0x1.75e1cep-8f);
    p = fma(p, s, broadcast(0x1.52269cp-6f));
    p = fma(p, s, broadcast(-0x1.b83c5ap-5f));
    p = fma(p, s, broadcast(0x1.110726p-3f));
    p = fma(p, s, broadcast(-0x1.555532p-2f));
    const Float near = fma(u * s, p, u);
    const float twice_log2e = 0x1.715476p+1f;
    // From 10 on tanh rounds to 1.
    const Float capped = u > 10.0f ? broadcast(10.0f) : u;
    const Float far = 1.0f - 2.0f / (exp2_above_floor(capped * twice_log2e) + 1.0f);
    return copy_sign(u < 0.625f ? near : far, x);
}

}  // namespace marlhf::MARLHF_ISA
