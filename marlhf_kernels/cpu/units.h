// What a loss counts: tokens or macro actions, and what their sum is divided by.

#pragma once

#include <cstdint>

#include "rows.h"
#include "weights.h"

namespace marlhf::MARLHF_ISA {
namespace {

enum Normalization : std::int64_t { TOKENS, MACROS, SEQUENCES };

// How the sum over units is divided; no given normalizer: NaN.
struct Normalizer {
    Normalization by;
    double given;

    // The weight of a unit in a sequence with that many.
    double row_weight(std::int32_t units) const { return by == SEQUENCES && units > 1 ? 1.0 / units : 1.0; }
};

// The sums over one sequence. They are added up in the order of the sequences, whoever computed them.
struct RowSums {
    double loss = 0, kl = 0, ratio = 0;
    std::int64_t clipped = 0, units = 0, tokens = 0, macros = 0;
    float largest_ratio = 0;
};

struct Totals : RowSums {
    std::int64_t sequences = 0;

    Totals(const Buffer<RowSums>& rows, std::int64_t number) {
        for (std::int64_t i = 0; i < number; ++i) {
            const RowSums& row = rows[i];
            loss += row.loss;
            kl += row.kl;
            ratio += row.ratio;
            clipped += row.clipped;
            units += row.units;
            tokens += row.tokens;
            macros += row.macros;
            sequences += row.tokens > 0;
            largest_ratio = std::max(largest_ratio, row.largest_ratio);
        }
    }

    // What the sum over units is divided by; 1 where there is no action token, against 0 / 0.
    double count(const Normalizer& normalizer) const {
        if (tokens == 0) return 1;
        if (normalizer.given == normalizer.given) return normalizer.given;
        return static_cast<double>(normalizer.by == TOKENS ? tokens : normalizer.by == MACROS ? macros : sequences);
    }

    double per_unit(double sum) const { return units ? sum / static_cast<double>(units) : 0; }
};

// How many tokens are summed up by lanes, in float32, before the sums are brought together in float64.
constexpr std::int32_t BLOCK = 32 * LANES;

MARLHF_INLINE Float clamp(Float x, Float low, Float high) {
    const Float raised = x < low ? low : x;
    return raised > high ? high : raised;
}

// A comparison is -1 in the lanes where it holds: minus the sum of comparisons.
MARLHF_INLINE std::int32_t number_of_true(Int comparisons) {
    std::int32_t result = 0;
    for (int lane = 0; lane < LANES; ++lane) result -= comparisons[lane];
    return result;
}

}  // namespace
}  // namespace marlhf::MARLHF_ISA
