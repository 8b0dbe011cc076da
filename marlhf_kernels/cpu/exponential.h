// The exponential function of tokens, written so that compilers vectorise loops over it.

#pragma once

#include "rows.h"

namespace marlhf::MARLHF_ISA {
namespace {

inline float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

// e^x and e^x - 1 - x, both without cancellation. With x = k log 2 + r and e^r = 1 + r + r^2 q,
// e^x - 1 - x = 2^k r^2 q + (2^k r - x) + (2^k - 1), whose last terms vanish exactly where k = 0.
inline void exponential(float x, float& power, float& excess) {
    constexpr float LOG2_E = 1.44269504f, LOG_2_HIGH = 0.693359375f, LOG_2_LOW = -2.12194440e-4f;
    constexpr float LARGEST = 88.7228f, SMALLEST = -87.0f;
    constexpr float ROUNDER = 12582912;  // adding 1.5 * 2^23 rounds to a whole number
    const float inside = clamp(x, SMALLEST, LARGEST);
    float k = (inside * LOG2_E + ROUNDER) - ROUNDER;
    k = k > 127 ? 127 : k;
    const float r = (inside - k * LOG_2_HIGH) - k * LOG_2_LOW;
    const float scale = bits<float>((static_cast<std::int32_t>(k == k ? k : 0) + 127) << 23);
    float q = 1.0f / 5040;
    q = q * r + 1.0f / 720;
    q = q * r + 1.0f / 120;
    q = q * r + 1.0f / 24;
    q = q * r + 1.0f / 6;
    q = q * r + 1.0f / 2;
    const float square = r * r * q;
    power = scale + scale * (r + square);
    const float rest = scale * square + ((scale * r - x) + (scale - 1));
    excess = x > LARGEST ? std::numeric_limits<float>::infinity() : rest;
}

}  // namespace
}  // namespace marlhf::MARLHF_ISA
