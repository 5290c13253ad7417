/*
 * An independent witness of the GVL, inside the traced process.
 *
 * From Ruby 3.2 on it hooks CRuby's own thread events and writes down, at each READY, RESUMED and SUSPENDED, the time, the
 * native thread, the Ruby thread, how often the kernel had taken the CPU from the native thread by then, and for how long
 * it had been without one although it could run. Nothing in the hook allocates.
 *
 *   GvlWitness.start        (re)starts with an empty log
 *   GvlWitness.stop         stops logging
 *   GvlWitness.events       the log: [event, ns, tid, thread, preempted, run_delay] each; nil before 3.2
 *   GvlWitness.hold ms      uses so many milliseconds and keeps the GVL: as C code does that never gives it up
 *   GvlWitness.now          CLOCK_MONOTONIC in nanoseconds
 *   GvlWitness.tid          native thread id
 *   GvlWitness.run_delay    nanoseconds for which the native thread could run and had no CPU, since it began
 *                           (Documentation/scheduler/sched-stats.rst); keeps the GVL
 */
#define _GNU_SOURCE /* syscall, RUSAGE_THREAD */
#include <ruby.h>
#include <ruby/thread.h>

#include <fcntl.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static VALUE witness_now(VALUE self)
{
    return ULL2NUM(now_ns());
}

static VALUE witness_tid(VALUE self)
{
    return LONG2NUM(syscall(SYS_gettid));
}

static VALUE witness_hold(VALUE self, VALUE ms)
{
    uint64_t end = now_ns() + NUM2ULL(ms) * 1000000u;
    while (now_ns() < end) continue;
    return Qnil;
}

/* 0: it could not be read. */
static uint64_t run_delay_ns(void)
{
    char text[128] = "";
    int fd = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    uint64_t delay;
    return length > 0 && sscanf(text, "%*u %" SCNu64, &delay) == 1 ? delay + 1 : 0;
}

static VALUE witness_run_delay(VALUE self)
{
    uint64_t delay = run_delay_ns();
    if (delay == 0) rb_raise(rb_eRuntimeError, "no /proc/thread-self/schedstat");
    return ULL2NUM(delay);
}

#ifdef RUBY_INTERNAL_THREAD_EVENT_READY

enum { MOST = 200000 };

struct event {
    uint64_t ns;
    uint64_t thread;
    uint32_t event;
    uint32_t tid;
    uint64_t preempted;
    uint64_t delay;
};

static struct event events[MOST];
static uint64_t used;
static int recording;

static void on_event(rb_event_flag_t event, const rb_internal_thread_event_data_t *data, void *user)
{
    uint64_t ns = now_ns();
    if (!recording) return;
    /* Threads of several Ractors come here at the same time. */
    uint64_t at = __atomic_fetch_add(&used, 1, __ATOMIC_RELAXED);
    if (at >= MOST) return;
    struct event *e = &events[at];
    e->ns = ns;
#ifdef RB_INTERNAL_THREAD_SPECIFIC_KEY_MAX
    e->thread = (uint64_t)data->thread;
#else
    e->thread = 0;
#endif
    e->event = event;
    e->tid = (uint32_t)syscall(SYS_gettid);
    struct rusage usage;
    e->preempted = getrusage(RUSAGE_THREAD, &usage) == 0 ? (uint64_t)usage.ru_nivcsw : 0;
    e->delay = run_delay_ns();
}

static VALUE witness_start(VALUE self)
{
    static int hooked;
    if (!hooked) {
        rb_event_flag_t wanted = RUBY_INTERNAL_THREAD_EVENT_READY | RUBY_INTERNAL_THREAD_EVENT_RESUMED |
                                 RUBY_INTERNAL_THREAD_EVENT_SUSPENDED;
        rb_internal_thread_add_event_hook(on_event, wanted, NULL);
        hooked = 1;
    }
    used = 0;
    recording = 1;
    return Qnil;
}

static VALUE witness_stop(VALUE self)
{
    recording = 0;
    return Qnil;
}

static VALUE witness_events(VALUE self)
{
    if (used > MOST) rb_raise(rb_eRuntimeError, "the witness's buffer was too small for %lu events", (unsigned long)used);
    VALUE list = rb_ary_new();
    for (uint64_t i = 0; i < used; i++) {
        struct event *e = &events[i];
        const char *name = e->event == RUBY_INTERNAL_THREAD_EVENT_READY ? "ready" :
                           e->event == RUBY_INTERNAL_THREAD_EVENT_RESUMED ? "resumed" : "suspended";
        rb_ary_push(list, rb_ary_new_from_args(6, rb_str_new_cstr(name), ULL2NUM(e->ns), UINT2NUM(e->tid),
                                               ULL2NUM(e->thread), ULL2NUM(e->preempted), ULL2NUM(e->delay)));
    }
    return list;
}

#else

static VALUE witness_start(VALUE self) { return Qnil; }
static VALUE witness_stop(VALUE self) { return Qnil; }
static VALUE witness_events(VALUE self) { return Qnil; }

#endif

void Init_gvl_witness(void)
{
    VALUE witness = rb_define_module("GvlWitness");
    rb_define_module_function(witness, "start", witness_start, 0);
    rb_define_module_function(witness, "stop", witness_stop, 0);
    rb_define_module_function(witness, "events", witness_events, 0);
    rb_define_module_function(witness, "hold", witness_hold, 1);
    rb_define_module_function(witness, "now", witness_now, 0);
    rb_define_module_function(witness, "tid", witness_tid, 0);
    rb_define_module_function(witness, "run_delay", witness_run_delay, 0);
}
