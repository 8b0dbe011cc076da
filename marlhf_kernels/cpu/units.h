// What a loss counts: tokens or macro actions, and what their sum is divided by.

#pragma once

#include <cstdint>

#include "exponential.h"
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
    std::int32_t largest_ratio = 0;  // the bits of a positive float, which are ordered as the floats are
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

inline double total(const float* x, std::int32_t n) {
    return sum_of(n, [x](std::int32_t i) -> double { return x[i]; });
}

}  // namespace
}  // namespace marlhf::MARLHF_ISA
