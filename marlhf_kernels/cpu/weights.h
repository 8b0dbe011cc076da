// The weights of the tokens of one macro action: the sums that they make, and each by itself.

#pragma once

#include <cstdint>

namespace marlhf::MARLHF_ISA {
namespace {

enum Weights : std::int64_t { SUM, DISCOUNTED_SUM, MEAN, FIRST, LAST, POSITION, POSITION_REVERSED };

// Four sums side by side, always added in the same order.
template <typename Term>
inline double sum_of(std::int32_t n, Term term) {
    double total = 0;
    std::int32_t i = 0;
    if (n >= 16) {
        double lanes[4] = {};
        for (; i + 4 <= n; i += 4)
            for (std::int32_t lane = 0; lane < 4; ++lane) lanes[lane] += term(i + lane);
        total = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
    }
    for (; i < n; ++i) total += term(i);
    return total;
}

inline double harmonic(std::int32_t n) {
    return sum_of(n, [](std::int32_t i) { return 1.0 / (i + 1); });
}

// The weighted sum over the n tokens of a macro action. Only `discounted_sum` takes the discount.
inline double weighted_sum(Weights weights, double discount, const float* x, std::int32_t n) {
    switch (weights) {
        case SUM: return sum_of(n, [x](std::int32_t i) -> double { return x[i]; });
        case MEAN: return sum_of(n, [x](std::int32_t i) -> double { return x[i]; }) / n;
        case FIRST: return x[0];
        case LAST: return x[n - 1];
        case POSITION: return sum_of(n, [x, n](std::int32_t i) { return x[i] / double(n - i); }) / harmonic(n);
        case POSITION_REVERSED: return sum_of(n, [x](std::int32_t i) { return x[i] / double(i + 1); }) / harmonic(n);
        case DISCOUNTED_SUM: break;
    }
    // A token of weight 0 adds nothing, not even NaN out of 0 * inf.
    if (discount == 0) return x[0];
    double total = x[n - 1];
    for (std::int32_t i = n - 2; i >= 0; --i) total = x[i] + discount * total;
    return total;
}

// result[i] = factor * the weight of token i.
inline void weigh(Weights weights, double discount, double factor, std::int32_t n, float* result) {
    const bool positions = weights == POSITION || weights == POSITION_REVERSED;
    if (weights == MEAN) factor /= n;
    if (positions) factor /= harmonic(n);
    for (std::int32_t i = 0; i < n; ++i) {
        double weight = 1;
        if (weights == DISCOUNTED_SUM) {
            result[i] = static_cast<float>(factor);
            factor *= discount;
            continue;
        }
        if (weights == FIRST) weight = i == 0;
        if (weights == LAST) weight = i == n - 1;
        if (weights == POSITION) weight = 1.0 / (n - i);
        if (weights == POSITION_REVERSED) weight = 1.0 / (i + 1);
        result[i] = static_cast<float>(factor * weight);
    }
}

}  // namespace
}  // namespace marlhf::MARLHF_ISA
