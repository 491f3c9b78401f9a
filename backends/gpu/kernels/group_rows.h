// Rows by expert: from what each row chose to lists that a grouped product walks.
//
//     chosen   i32 [pairs], pairs = rows * used: the expert of each choice; pair p is choice p % used of row p / used
//     order    i32 [pairs]: the pairs of expert `first`, then of the next one, up to `end` - 1; those of one expert in
//              ascending order. What is behind the last of them is not written: choices of experts that are not here
//     tiles    i32 [tile_count][4]: runs of at most tile_rows entries of `order` with one expert: {expert - first, where the
//              run begins in order, how long it is, 0}. Tiles that are not needed have length 0
//
// Grid: one block of 256 threads for each expert that is here. Every block counts all choices (integers in block memory: any
// order gives the same counts), so it knows where its own begin without asking another block, and then writes its own in
// order, 256 choices at a time, by ballots: no block waits, no memory is set to zero before, and the lists are the same in
// every run.
//
// Roofline: latency. Experts times pairs times 4 bytes come from L2, twice: 128 experts and 512 rows of 8 are 4 MB, 2 us;
// 256 experts and 8192 rows of 8 are 128 MB, 60 us, beside milliseconds of products.
#pragma once

constexpr int MOST_EXPERTS = 1024, GROUP_THREADS = 256;

DEVICE int bits_set(u64 v) {
    v -= v >> 1 & 0x5555555555555555ull;
    v = (v & 0x3333333333333333ull) + (v >> 2 & 0x3333333333333333ull);
    return (int)(((v + (v >> 4)) & 0x0f0f0f0f0f0f0f0full) * 0x0101010101010101ull >> 56);
}

DEVICE void group_pairs(int *order, int *tiles, const int *chosen, int pairs, int first, int end, int tile_rows,
                        int tile_count) {
    SHARED(int, counts, MOST_EXPERTS);
    SHARED(int, before, 2);   // pairs and tiles of the experts in front
    SHARED(int, votes, GROUP_THREADS / WARP);
    const int held = end - first, mine = block_x();
    for (int e = thread(); e < held; e += threads()) counts[e] = 0;
    if (thread() < 2) before[thread()] = 0;
    block_barrier();
    for (int p = thread(); p < pairs; p += threads()) {
        const int e = chosen[p] - first;
        if (e >= 0 && e < held) atomic_add(&counts[e], 1);
    }
    block_barrier();
    for (int e = thread(); e < mine; e += threads()) {
        atomic_add(&before[0], counts[e]);
        atomic_add(&before[1], ceil_div(counts[e], tile_rows));
    }
    block_barrier();

    const int count = counts[mine], begin = before[0], tile = before[1], own_tiles = ceil_div(count, tile_rows);
    for (int t = thread(); t < own_tiles; t += threads()) {
        const int at = t * tile_rows, rows = count - at < tile_rows ? count - at : tile_rows;
        store128(tiles + 4 * (tile + t), {(u32)mine, (u32)(begin + at), (u32)rows, 0});
    }
    if (mine == held - 1) {
        for (int t = tile + own_tiles + thread(); t < tile_count; t += threads()) store128(tiles + 4 * t, {0, 0, 0, 0});
    }
    int done = 0;
    for (int base = 0; base < pairs && done < count; base += threads()) {
        const int p = base + thread();
        const bool own = p < pairs && chosen[p] - first == mine;
        const u64 vote = ballot(own);
        if (lane() == 0) votes[warp()] = bits_set(vote);
        block_barrier();
        int place = bits_set(vote & (((u64)1 << lane()) - 1)), all = 0;
        for (int w = 0; w < threads() / WARP; w++) {
            if (w < warp()) place += votes[w];
            all += votes[w];
        }
        if (own) order[begin + done + place] = p;
        done += all;
        block_barrier();
    }
}
