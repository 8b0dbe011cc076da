// The exponential function of log-ratios.

#pragma once

#include <limits>

#include "simd.h"

namespace marlhf::MARLHF_ISA {

struct Exponential {
    Float power;   // e^x
    Float excess;  // e^x - 1 - x
};

// Neither of the two cancels: with x = k log 2 + r and e^r = 1 + r + r^2 q,
// e^x - 1 - x = 2^k r^2 q + (2^k r - x) + (2^k - 1), whose last terms vanish exactly where k = 0.
MARLHF_INLINE Exponential exponential(Float x) {
    constexpr float LOG2_E = 1.44269504f, LOG_2_HIGH = 0.693359375f, LOG_2_LOW = -2.12194440e-4f;
    constexpr float LARGEST = 88.7228f, SMALLEST = -87.0f;  // between them e^x is a normal float32
    constexpr float ROUNDER = 0x1.8p23f;                    // adding it rounds to a whole number
    Float inside = x < SMALLEST ? broadcast(SMALLEST) : x;
    inside = inside > LARGEST ? broadcast(LARGEST) : inside;
    const Float shifted = inside * LOG2_E + ROUNDER;
    const Float whole = shifted - ROUNDER;
    const Float k = whole > 127.0f ? broadcast(127.0f) : whole;
    const Float r = fma(k, broadcast(-LOG_2_LOW), fma(k, broadcast(-LOG_2_HIGH), inside));
    const Float scale = (Float)((__builtin_convertvector(k == k ? k : Float{}, Int) + 127) << 23);
    Float q = broadcast(1.0f / 5040);
    q = fma(q, r, broadcast(1.0f / 720));
    q = fma(q, r, broadcast(1.0f / 120));
    q = fma(q, r, broadcast(1.0f / 24));
    q = fma(q, r, broadcast(1.0f / 6));
    q = fma(q, r, broadcast(1.0f / 2));
    const Float square = r * r * q;
    const Float excess = fma(scale, square, (scale * r - x) + (scale - 1.0f));
    return {fma(scale, r + square, scale),
            x > LARGEST ? broadcast(std::numeric_limits<float>::infinity()) : excess};
}

}  // namespace marlhf::MARLHF_ISA
