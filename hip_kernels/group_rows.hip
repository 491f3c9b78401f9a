#include "device.h"
#include "group_rows.h"

KERNEL(group_rows, GROUP_THREADS, 4)
(i32 *order, i32 *tiles, const i32 *chosen, i32 pairs, i32 first, i32 end, i32 tile_rows, i32 tile_count) {
    group_pairs(order, tiles, chosen, pairs, first, end, tile_rows, tile_count);
}
