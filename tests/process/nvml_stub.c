/* An NVML that plays the cards which a text file describes: the library that tests put in place of libnvidia-ml.so.1.
 *
 * The file (environment variable NVML_STUB) is read at each initialisation. Its lines:
 *
 *     init CODE                 initialisation fails with this code
 *     fail FUNCTION CODE        this function fails with this code, whatever it is asked
 *     hang FUNCTION FILE        this function does not return before FILE exists
 *     card KEY=VALUE ...        a card; _ in a value stands for a blank; what is not given is not supported
 *     slice KEY=VALUE ...       a MIG slice of the card above it
 *     peer A B CODE             peer access from card A to card B (without a line: 0, OK)
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, UNKNOWN = 999, MOST = 32 };

typedef unsigned long long u64;
typedef struct { char key[16]; char value[96]; } Pair;
typedef struct Card { Pair pairs[24]; int pair_count; struct Card *slices[MOST]; int slice_count; } Card;
typedef struct { char function[64]; int code; char file[512]; } Rule;

static Card cards[MOST], slices[MOST];
static int card_count, slice_count, rule_count, peers[MOST][MOST], init_code;
static Rule rules[MOST];

static const char *get(const Card *card, const char *key) {
    for (int i = 0; i < card->pair_count; i++)
        if (!strcmp(card->pairs[i].key, key)) return card->pairs[i].value;
    return NULL;
}

static int rule(const char *function) {
    for (int i = 0; i < rule_count; i++) {
        if (strcmp(rules[i].function, function)) continue;
        while (rules[i].file[0] && access(rules[i].file, F_OK)) usleep(1000);
        return rules[i].code;
    }
    return OK;
}

static void parse_card(Card *card) {
    memset(card, 0, sizeof *card);
    for (char *word; (word = strtok(NULL, " \n")) && card->pair_count < 24;) {
        char *equals = strchr(word, '=');
        if (!equals) continue;
        Pair *pair = &card->pairs[card->pair_count++];
        snprintf(pair->key, sizeof pair->key, "%.*s", (int)(equals - word), word);
        snprintf(pair->value, sizeof pair->value, "%s", equals + 1);
        for (char *c = pair->value; *c; c++) if (*c == '_') *c = ' ';
    }
}

static void parse(void) {
    char line[4096];
    const char *path = getenv("NVML_STUB");
    FILE *file = path ? fopen(path, "r") : NULL;
    card_count = slice_count = rule_count = init_code = 0;
    memset(peers, 0, sizeof peers);
    while (file && fgets(line, sizeof line, file)) {
        char *word = strtok(line, " \n");
        if (!word) continue;
        if (!strcmp(word, "card") && card_count < MOST) parse_card(&cards[card_count++]);
        else if (!strcmp(word, "slice") && card_count && slice_count < MOST) {
            Card *parent = &cards[card_count - 1];
            parse_card(&slices[slice_count]);
            parent->slices[parent->slice_count++] = &slices[slice_count++];
        } else {
            char *first = strtok(NULL, " \n"), *second = strtok(NULL, " \n"), *third = strtok(NULL, " \n");
            if (!strcmp(word, "init") && first) init_code = atoi(first);
            else if (!strcmp(word, "peer") && third) peers[atoi(first)][atoi(second)] = atoi(third);
            else if (second && rule_count < MOST) {
                Rule *added = &rules[rule_count++];
                memset(added, 0, sizeof *added);
                snprintf(added->function, sizeof added->function, "%s", first);
                if (!strcmp(word, "fail")) added->code = atoi(second);
                else snprintf(added->file, sizeof added->file, "%s", second);
            }
        }
    }
    if (file) fclose(file);
}

#define ASK() do { int code = rule(__func__); if (code) return code; } while (0)

static int number(const Card *card, const char *key, u64 *out) {
    const char *text = get(card, key);
    if (!text) return NOT_SUPPORTED;
    *out = strtoull(text, NULL, 0);
    return OK;
}

static int small(const Card *card, const char *key, unsigned *out) {
    u64 value = 0;
    int code = number(card, key, &value);
    if (!code) *out = (unsigned)value;
    return code;
}

static int text(const Card *card, const char *key, char *out, unsigned length) {
    const char *value = get(card, key);
    if (!value) return NOT_SUPPORTED;
    snprintf(out, length, "%s", value);
    return OK;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; parse(); ASK(); return init_code; }
int nvmlShutdown(void) { ASK(); return OK; }
const char *nvmlErrorString(int code) { (void)code; return "the stub says no"; }
int nvmlDeviceGetCount_v2(unsigned *count) { ASK(); *count = card_count; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Card **out) {
    ASK();
    if ((int)index >= card_count) return INVALID;
    u64 code = 0;
    if (!number(&cards[index], "lost", &code)) return (int)code;
    *out = &cards[index];
    return OK;
}
int nvmlDeviceGetName(Card *card, char *out, unsigned length) { ASK(); return text(card, "name", out, length); }
int nvmlDeviceGetUUID(Card *card, char *out, unsigned length) { ASK(); return text(card, "uuid", out, length); }
int nvmlDeviceGetMaxPcieLinkGeneration(Card *card, unsigned *out) { ASK(); return small(card, "gen", out); }
int nvmlDeviceGetMaxPcieLinkWidth(Card *card, unsigned *out) { ASK(); return small(card, "width", out); }
int nvmlDeviceGetDisplayActive(Card *card, unsigned *out) { ASK(); return small(card, "display", out); }
int nvmlDeviceGetMemoryBusWidth(Card *card, unsigned *out) { ASK(); return small(card, "bits", out); }
int nvmlDeviceGetMaxClockInfo(Card *card, int kind, unsigned *out) {
    ASK();
    return kind == 2 ? small(card, "clock", out) : INVALID;
}
int nvmlDeviceGetCudaComputeCapability(Card *card, int *major, int *minor) {
    ASK();
    int code = small(card, "major", (unsigned *)major);
    return code ? code : small(card, "minor", (unsigned *)minor);
}

typedef struct { u64 total, free, used; } Memory;
int nvmlDeviceGetMemoryInfo(Card *card, Memory *out) {
    ASK();
    u64 reserved = 0, used = 0, free = 0;
    int code = number(card, "total", &out->total);
    number(card, "reserved", &reserved);
    number(card, "used", &used);
    out->used = used + reserved;
    out->free = number(card, "free", &free) ? out->total - out->used : free;
    return code;
}

typedef struct { unsigned version; u64 total, reserved, free, used; } MemoryV2;
int nvmlDeviceGetMemoryInfo_v2(Card *card, MemoryV2 *out) {
    ASK();
    if (out->version != 0x02000028) return 25;
    u64 free = 0;
    int code = number(card, "total", &out->total);
    out->reserved = out->used = 0;
    number(card, "reserved", &out->reserved);
    number(card, "used", &out->used);
    out->free = number(card, "free", &free) ? out->total - out->used - out->reserved : free;
    return code;
}

typedef struct { u64 total, free, used; } Bar1;
int nvmlDeviceGetBAR1MemoryInfo(Card *card, Bar1 *out) {
    ASK();
    out->used = 0;
    number(card, "bar1used", &out->used);
    int code = number(card, "bar1", &out->total);
    out->free = out->total - out->used;
    return code;
}

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
int nvmlDeviceGetPciInfo_v3(Card *card, Pci *out) { ASK(); return text(card, "pci", out->bus_id, sizeof out->bus_id); }

int nvmlDeviceGetP2PStatus(Card *one, Card *other, int kind, int *out) {
    ASK();
    (void)kind;
    *out = peers[one - cards][other - cards];
    return OK;
}

int nvmlDeviceGetMigMode(Card *card, unsigned *current, unsigned *pending) {
    ASK();
    *pending = 0;
    return small(card, "mig", current);
}
int nvmlDeviceGetMaxMigDeviceCount(Card *card, unsigned *out) { ASK(); (void)card; *out = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(Card *card, unsigned index, Card **out) {
    ASK();
    if ((int)index >= card->slice_count) return NOT_FOUND;
    *out = card->slices[index];
    return OK;
}
