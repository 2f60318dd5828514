// Which stages of which tiles a CTA computes: equal shares, so that every SM has the same work.
//
// The tiles' stages (steps of the pipeline along K) are numbered tile after tile. A period of CTAs shares a period of
// stages evenly: with split-K a period is one tile and its `split_k` CTAs; with stripes it is the whole grid, and a CTA
// may end one tile, compute others whole and begin the next.
#pragma once

struct Stripes {
    int ctas;   // CTAs of a period
    int share;  // stages of a CTA ...
    int extra;  // ... and the first `extra` CTAs of a period have one more

    // The first stage of the period that the CTA of this rank computes; that of the next rank ends it.
    __device__ __forceinline__ u32 start(u32 rank) const { return rank * share + min(rank, u32(extra)); }

    // Which CTA of the period computes this stage.
    __device__ __forceinline__ u32 rank_of(u32 stage) const {
        const u32 longer = u32(extra) * u32(share + 1);
        return stage < longer ? stage / u32(share + 1) : extra + (stage - longer) / u32(share);
    }
};
