/*
 * An independent witness of the garbage collector, inside the traced process.
 *
 * It hooks CRuby's own internal GC events and writes down, at each GC_START and GC_END_SWEEP, every key of GC.stat and
 * GC.latest_gc_info, and the time, the thread and how often the kernel has preempted it of every event. Nothing in the hook allocates a Ruby object or calls
 * malloc, so the witness does not change what it sees; it reads every key twice and counts keys that differ between
 * the two readings.
 *
 *   Witness.watch_memory  from the next start on, resident memory is written down at GC_START and GC_END_SWEEP, too: what the
 *                      counters say (/proc/self/status) and what a walk of the page tables finds (/proc/self/smaps_rollup)
 *   Witness.start      (re)starts with an empty log in this process
 *   Witness.stop       stops logging
 *   Witness.dump path  writes the log as JSON lines; returns the number of events
 *   Witness.now        CLOCK_MONOTONIC in nanoseconds
 *   Witness.collect    a collection asked for by C code
 *   Witness.unprotect object  takes the write barrier off an object, as an extension that uses RARRAY_PTR does
 */
#define _GNU_SOURCE /* RUSAGE_THREAD */
#include <ruby.h>
#include <ruby/debug.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_KEYS 96
#define MAX_SYMBOLS 64
#define SYMBOL_BYTES 48
/* Room for about 400 000 snapshots; only touched pages exist. */
#define LOG_WORDS ((size_t)16 << 20)

/* One event: ns, tid, event flag, preemptions of the thread, whether it is alone; for GC_START and GC_END_SWEEP the stat
 * values and the info values follow, and memory, if it is watched. */
enum { HEAD_WORDS = 5 };

/* Fields of /proc/self/status and, last, of smaps_rollup; kB. */
static const char *const memory_fields[] = {"VmRSS", "VmHWM", "RssAnon", "RssFile", "RssShmem", "VmSwap", "Rss"};
enum { MEMORY_WORDS = sizeof memory_fields / sizeof *memory_fields };
static int watching_memory;

static uint64_t *log_words;
static size_t used, events, dropped, unstable;
static int recording, hooked;
static uint64_t begin_ns, begin_real_ns, end_ns, end_real_ns;
/* What the collector was in the middle of when the log began. */
static VALUE begin_state = Qnil;

static int stat_count, info_count;
static VALUE stat_keys[MAX_KEYS], info_keys[MAX_KEYS];
static char stat_names[MAX_KEYS][SYMBOL_BYTES], info_names[MAX_KEYS][SYMBOL_BYTES];

/* Symbols seen as values of latest_gc_info; they are static symbols, which live for ever. */
static int symbol_count;
static VALUE symbols[MAX_SYMBOLS];

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Realtime of this moment on the monotonic clock: of several tries, the one with the shortest window around the reading. What is scheduled
   between two single readings would move all times of the log. */
static uint64_t real_at(uint64_t moment_ns)
{
    uint64_t shortest = UINT64_MAX, real_ns = 0;
    for (int attempt = 0; attempt < 16; attempt++) {
        uint64_t before = clock_ns(CLOCK_MONOTONIC);
        uint64_t real = clock_ns(CLOCK_REALTIME);
        uint64_t window = clock_ns(CLOCK_MONOTONIC) - before;
        if (window < shortest) {
            shortest = window;
            real_ns = real - (before + window / 2) + moment_ns;
        }
    }
    return real_ns;
}

static void remember_symbol(VALUE v)
{
    for (int i = 0; i < symbol_count; i++)
        if (symbols[i] == v) return;
    if (symbol_count < MAX_SYMBOLS) symbols[symbol_count++] = v;
}

/* A file of /proc as a string, in a buffer that is there already. */
static const char *read_proc(const char *path)
{
    static char text[8192];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return "";
    size_t len = 0;
    for (ssize_t got; len < sizeof text - 1 && (got = read(fd, text + len, sizeof text - 1 - len)) > 0;) len += (size_t)got;
    close(fd);
    text[len] = 0;
    return text;
}

/* The number of kB behind a name at the beginning of a line; a number that cannot be if it is not there. */
static uint64_t field(const char *text, const char *name)
{
    size_t len = strlen(name);
    for (const char *line = text; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, name, len) || line[len] != ':') continue;
        uint64_t number = 0;
        for (line += len + 1; *line == ' ' || *line == '\t'; line++) continue;
        for (; *line >= '0' && *line <= '9'; line++) number = number * 10 + (uint64_t)(*line - '0');
        return number;
    }
    return UINT64_MAX;
}

static void read_memory(uint64_t *words)
{
    const char *status = read_proc("/proc/self/status");
    for (int i = 0; i < MEMORY_WORDS - 1; i++) words[i] = field(status, memory_fields[i]);
    words[MEMORY_WORDS - 1] = field(read_proc("/proc/self/smaps_rollup"), memory_fields[MEMORY_WORDS - 1]);
}

static int memory_words(void)
{
    return watching_memory ? MEMORY_WORDS : 0;
}

/* Whether no other thread of the process can allocate: there is no other Ruby thread, and, as far as there is a /proc to say
 * so, no native thread but one, which can be the VM's timer (3.3 and later). A native thread can outlive its Ruby thread. */
static int alone(void)
{
    /* Not stat(2): its name has another version in older C libraries. */
    struct statx tasks;
    if (!rb_thread_alone()) return 0;
    return statx(AT_FDCWD, "/proc/self/task", 0, STATX_NLINK, &tasks) != 0 || tasks.stx_nlink - 2 <= 2;
}

static void on_event(rb_event_flag_t event, VALUE data, VALUE self, ID id, VALUE klass)
{
    uint64_t ns = clock_ns(CLOCK_MONOTONIC);
    (void)data, (void)self, (void)id, (void)klass;
    if (!recording) return;

    int state = event == RUBY_INTERNAL_EVENT_GC_START || event == RUBY_INTERNAL_EVENT_GC_END_SWEEP;
    size_t words = HEAD_WORDS + (state ? (size_t)(stat_count + info_count + memory_words()) : 0);
    if (used + words > LOG_WORDS) {
        dropped++;
        return;
    }
    uint64_t *w = log_words + used;
    /* First, so that nothing else of the hook is in it. */
    if (state && watching_memory) read_memory(w + HEAD_WORDS + stat_count + info_count);
    w[0] = ns;
    w[1] = (uint64_t)syscall(SYS_gettid);
    w[2] = (uint64_t)event;
    struct rusage usage;
    w[3] = getrusage(RUSAGE_THREAD, &usage) == 0 ? (uint64_t)usage.ru_nivcsw : 0;
    w[4] = (uint64_t)alone();
    if (state) {
        uint64_t *stat = w + HEAD_WORDS, *info = stat + stat_count;
        for (int i = 0; i < stat_count; i++) stat[i] = rb_gc_stat(stat_keys[i]);
        for (int i = 0; i < info_count; i++) {
            VALUE v = rb_gc_latest_gc_info(info_keys[i]);
            if (SYMBOL_P(v)) remember_symbol(v);
            info[i] = (uint64_t)v;
        }
        for (int i = 0; i < stat_count; i++) unstable += stat[i] != rb_gc_stat(stat_keys[i]);
        for (int i = 0; i < info_count; i++) unstable += info[i] != (uint64_t)rb_gc_latest_gc_info(info_keys[i]);
    }
    used += words;
    events++;
}

static void collect_keys(VALUE hash, VALUE *keys, char names[][SYMBOL_BYTES], int *count)
{
    VALUE list = rb_funcall(hash, rb_intern("keys"), 0);
    *count = 0;
    for (long i = 0; i < RARRAY_LEN(list); i++) {
        VALUE key = rb_ary_entry(list, i);
        if (i >= MAX_KEYS) rb_raise(rb_eRuntimeError, "more keys than the witness has room for");
        keys[i] = key;
        snprintf(names[i], SYMBOL_BYTES, "%s", rb_id2name(SYM2ID(key)));
        *count = (int)i + 1;
    }
    RB_GC_GUARD(list);
}

/* Reads once, so that the pages that a reading needs are there when the first one counts. */
static VALUE witness_watch_memory(VALUE self)
{
    uint64_t words[MEMORY_WORDS];
    read_memory(words);
    watching_memory = 1;
    return Qnil;
}

static VALUE witness_start(VALUE self)
{
    if (!log_words) {
        log_words = mmap(NULL, LOG_WORDS * sizeof(uint64_t), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (log_words == MAP_FAILED) rb_sys_fail("mmap");
        VALUE gc = rb_const_get(rb_cObject, rb_intern("GC"));
        collect_keys(rb_funcall(gc, rb_intern("stat"), 0), stat_keys, stat_names, &stat_count);
        collect_keys(rb_funcall(gc, rb_intern("latest_gc_info"), 0), info_keys, info_names, &info_count);
    }
    if (!hooked) {
        hooked = 1;
        rb_add_event_hook(on_event,
                          RUBY_INTERNAL_EVENT_GC_START | RUBY_INTERNAL_EVENT_GC_END_MARK |
                              RUBY_INTERNAL_EVENT_GC_END_SWEEP | RUBY_INTERNAL_EVENT_GC_ENTER |
                              RUBY_INTERNAL_EVENT_GC_EXIT,
                          Qnil);
    }
    if (watching_memory) {
        /* What the hook will write to shall be there, or the hook would change what it reads. */
        memset(log_words, 0, (size_t)8 << 20);
        uint64_t words[MEMORY_WORDS];
        read_memory(words);
    }
    used = events = dropped = unstable = 0;
    begin_state = rb_gc_latest_gc_info(ID2SYM(rb_intern("state")));
    remember_symbol(begin_state);
    begin_ns = clock_ns(CLOCK_MONOTONIC);
    begin_real_ns = real_at(begin_ns);
    recording = 1;
    return Qnil;
}

static VALUE witness_stop(VALUE self)
{
    recording = 0;
    end_ns = clock_ns(CLOCK_MONOTONIC);
    end_real_ns = real_at(end_ns);
    return Qnil;
}

static const char *event_name(uint64_t event)
{
    switch (event) {
    case RUBY_INTERNAL_EVENT_GC_START: return "start";
    case RUBY_INTERNAL_EVENT_GC_END_MARK: return "end_mark";
    case RUBY_INTERNAL_EVENT_GC_END_SWEEP: return "end_sweep";
    case RUBY_INTERNAL_EVENT_GC_ENTER: return "enter";
    case RUBY_INTERNAL_EVENT_GC_EXIT: return "exit";
    default: return "unknown";
    }
}

static void print_value(FILE *out, VALUE v)
{
    if (NIL_P(v)) fputs("null", out);
    else if (v == Qtrue) fputs("true", out);
    else if (v == Qfalse) fputs("false", out);
    else if (FIXNUM_P(v)) fprintf(out, "%ld", FIX2LONG(v));
    else {
        for (int i = 0; i < symbol_count; i++)
            if (symbols[i] == v) {
                fprintf(out, "\"%s\"", rb_id2name(SYM2ID(v)));
                return;
            }
        fputs("\"?\"", out);
    }
}

/* Page faults, without I/O, of all other threads that the process has now; none are counted where there is no /proc. */
static unsigned long long faults_of_others(void)
{
    unsigned long long sum = 0;
    DIR *tasks = opendir("/proc/self/task");
    if (!tasks) return 0;
    for (struct dirent *task; (task = readdir(tasks));) {
        char path[64 + sizeof task->d_name];
        unsigned long long faults;
        if (task->d_name[0] == '.' || strtol(task->d_name, NULL, 10) == syscall(SYS_gettid)) continue;
        snprintf(path, sizeof path, "/proc/self/task/%s/stat", task->d_name);
        /* The tenth field; the second is a name in parentheses, which can contain anything. */
        const char *rest = strrchr(read_proc(path), ')');
        if (rest && sscanf(rest, ") %*c %*d %*d %*d %*d %*d %*u %llu", &faults) == 1) sum += faults;
    }
    closedir(tasks);
    return sum;
}

static VALUE witness_dump(VALUE self, VALUE path)
{
    unsigned long long faults = faults_of_others();
    FILE *out = fopen(StringValueCStr(path), "w");
    if (!out) rb_sys_fail_str(path);
    fprintf(out, "{\"ev\":\"begin\",\"ns\":%llu,\"real_ns\":%llu,\"pid\":%d,\"state\":",
            (unsigned long long)begin_ns, (unsigned long long)begin_real_ns, (int)getpid());
    print_value(out, begin_state);
    fputs("}\n", out);
    for (size_t at = 0; at < used;) {
        const uint64_t *w = log_words + at;
        fprintf(out, "{\"ev\":\"%s\",\"ns\":%llu,\"tid\":%llu,\"preempted\":%llu,\"alone\":%s", event_name(w[2]),
                (unsigned long long)w[0], (unsigned long long)w[1], (unsigned long long)w[3], w[4] ? "true" : "false");
        at += HEAD_WORDS;
        if (w[2] == RUBY_INTERNAL_EVENT_GC_START || w[2] == RUBY_INTERNAL_EVENT_GC_END_SWEEP) {
            fputs(",\"stat\":{", out);
            for (int i = 0; i < stat_count; i++)
                fprintf(out, "%s\"%s\":%llu", i ? "," : "", stat_names[i],
                        (unsigned long long)w[HEAD_WORDS + i]);
            fputs("},\"info\":{", out);
            for (int i = 0; i < info_count; i++) {
                fprintf(out, "%s\"%s\":", i ? "," : "", info_names[i]);
                print_value(out, (VALUE)w[HEAD_WORDS + stat_count + i]);
            }
            fputs("}", out);
            at += (size_t)(stat_count + info_count);
            if (watching_memory) {
                fputs(",\"memory\":{", out);
                for (int i = 0; i < MEMORY_WORDS; i++)
                    fprintf(out, "%s\"%s\":%llu", i ? "," : "", memory_fields[i],
                            (unsigned long long)log_words[at + (size_t)i]);
                fputs("}", out);
                at += MEMORY_WORDS;
            }
        }
        fputs("}\n", out);
    }
    fprintf(out, "{\"ev\":\"finish\",\"ns\":%llu,\"real_ns\":%llu,\"events\":%zu,\"dropped\":%zu,\"unstable\":%zu,\"faults_of_others\":%llu}\n",
            (unsigned long long)end_ns, (unsigned long long)end_real_ns, events, dropped, unstable, faults);
    if (fclose(out) != 0) rb_sys_fail_str(path);
    return SIZET2NUM(events);
}

static VALUE witness_now(VALUE self)
{
    return ULL2NUM(clock_ns(CLOCK_MONOTONIC));
}

static VALUE witness_collect(VALUE self)
{
    rb_gc();
    return Qnil;
}

static VALUE witness_unprotect(VALUE self, VALUE object)
{
    rb_gc_writebarrier_unprotect(object);
    return Qnil;
}

void Init_witness(void)
{
    VALUE witness = rb_define_module("Witness");
    rb_define_module_function(witness, "watch_memory", witness_watch_memory, 0);
    rb_define_module_function(witness, "start", witness_start, 0);
    rb_define_module_function(witness, "stop", witness_stop, 0);
    rb_define_module_function(witness, "dump", witness_dump, 1);
    rb_define_module_function(witness, "now", witness_now, 0);
    rb_define_module_function(witness, "collect", witness_collect, 0);
    rb_define_module_function(witness, "unprotect", witness_unprotect, 1);
}
