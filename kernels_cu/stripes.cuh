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

    __device__ __forceinline__ int stages() const { return ctas * share + extra; }  // of a period

    // The first stage of a CTA; that of the next CTA ends it.
    __device__ __forceinline__ int start(int cta) const {
        const int period = cta / ctas, rank = cta % ctas;
        return period * stages() + rank * share + min(rank, extra);
    }

    __device__ __forceinline__ int cta_of(int stage) const {
        const int period = stage / stages(), rest = stage % stages(), longer = extra * (share + 1);
        return period * ctas + (rest < longer ? rest / (share + 1) : extra + (rest - longer) / share);
    }
};
