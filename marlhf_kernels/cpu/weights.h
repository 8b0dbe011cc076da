// The weights of the tokens of one macro action: the sums that they make, and each by itself.

#pragma once

#include <cstdint>

#include "rows.h"

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

inline double total(const float* x, std::int32_t n) {
    return sum_of(n, [x](std::int32_t i) -> double { return x[i]; });
}

inline double harmonic(std::int32_t n) {
    return sum_of(n, [](std::int32_t i) { return 1.0 / (i + 1); });
}

// The weighted sum over the n tokens of a macro action. Only `discounted_sum` takes the discount.
inline double weighted_sum(Weights weights, double discount, const float* x, std::int32_t n) {
    switch (weights) {
        case SUM: return total(x, n);
        case MEAN: return total(x, n) / n;
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

inline bool adds_up(Weights weights) { return weights == SUM || weights == MEAN; }

// The sum of each macro action, of N arrays at once: the work of finding one is shared.
template <int N>
void sums(const float* const (&x)[N], const Actions& actions, float* const (&result)[N]) {
    const std::int32_t count = actions.count(), macros = actions.macros();
    if (macros == count) {  // a token each
        for (int i = 0; i < N; ++i) std::copy_n(x[i], count, result[i]);
        return;
    }
    for (std::int32_t macro = 0; macro < macros; ++macro) {
        const std::int32_t start = actions.start(macro), length = actions.length(macro);
        if (length <= 2 * LANES && start + 2 * LANES <= count) {
            // Most macro actions are this short. How short does not branch: a processor cannot foresee it.
            const Int head = first_lanes(length), rest = first_lanes(length - LANES);
            for (int i = 0; i < N; ++i)
                result[i][macro] = sum((head ? load(x[i] + start) : Float{}) +
                                       (rest ? load(x[i] + start + LANES) : Float{}));
        } else {
            for (int i = 0; i < N; ++i) result[i][macro] = static_cast<float>(total(x[i] + start, length));
        }
    }
}

inline void divide_by_lengths(const Actions& actions, float* result) {
    for (std::int32_t macro = 0; macro < actions.macros(); ++macro)
        result[macro] /= static_cast<float>(actions.length(macro));
}

// The weighted sum of each macro action.
inline void weighted_sums(Weights weights, double discount, const float* x, const Actions& actions, float* result) {
    if (adds_up(weights)) {
        sums<1>({x}, actions, {result});
        if (weights == MEAN) divide_by_lengths(actions, result);
        return;
    }
    for (std::int32_t macro = 0; macro < actions.macros(); ++macro)
        result[macro] = static_cast<float>(
            weighted_sum(weights, discount, x + actions.start(macro), actions.length(macro)));
}

// Gives every token what its macro action has, in N arrays at once.
template <int N>
void spread(const float* const (&macro_x)[N], const Actions& actions, float* const (&result)[N]) {
    const std::int32_t count = actions.count(), macros = actions.macros();
    if (macros == count) {
        for (int i = 0; i < N; ++i) std::copy_n(macro_x[i], count, result[i]);
        return;
    }
    for (std::int32_t macro = 0; macro < macros; ++macro) {
        const std::int32_t end = actions.start(macro + 1);
        std::int32_t place = actions.start(macro);
        // What this writes beyond the macro action is overwritten by the next ones.
        for (; place < end && place + 2 * LANES <= count; place += 2 * LANES)
            for (int i = 0; i < N; ++i) {
                store(result[i] + place, broadcast(macro_x[i][macro]));
                store(result[i] + place + LANES, broadcast(macro_x[i][macro]));
            }
        for (; place < end; ++place)
            for (int i = 0; i < N; ++i) result[i][place] = macro_x[i][macro];
    }
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
