/*
 * Publishes the active span of a thread as an OpenTelemetry SDK does (OTEP 4947), inside the traced process.
 *
 *   Spans.enter trace, span     two strings of 16 and 8 bytes; nothing is allocated
 *   Spans.leave                 no span is active
 *   Spans.tear trace, span      an update that is not complete: the record is there and not valid
 *   Spans.point address         the variable points anywhere
 *
 * How a program finds the variable is up to the compiler's flags.
 */
#include <ruby.h>
#include <string.h>

struct record {
    uint8_t trace_id[16];
    uint8_t span_id[8];
    uint8_t valid;
    uint8_t flags;
    uint16_t attributes;
};

__attribute__((visibility("default"))) __thread struct record *otel_thread_ctx_v1;
static __thread struct record own;

#define FENCE() __atomic_signal_fence(__ATOMIC_SEQ_CST)

static void fill(VALUE trace, VALUE span, int valid)
{
    own.valid = 0;
    FENCE();
    memcpy(own.trace_id, RSTRING_PTR(trace), 16);
    memcpy(own.span_id, RSTRING_PTR(span), 8);
    FENCE();
    own.valid = valid;
    FENCE();
    otel_thread_ctx_v1 = &own;
}

static VALUE spans_enter(VALUE self, VALUE trace, VALUE span)
{
    fill(trace, span, 1);
    return Qnil;
}

static VALUE spans_tear(VALUE self, VALUE trace, VALUE span)
{
    fill(trace, span, 0);
    return Qnil;
}

static VALUE spans_leave(VALUE self)
{
    otel_thread_ctx_v1 = 0;
    return Qnil;
}

static VALUE spans_point(VALUE self, VALUE address)
{
    otel_thread_ctx_v1 = (struct record *)NUM2SIZET(address);
    return Qnil;
}

void Init_spans(void)
{
    VALUE spans = rb_define_module("Spans");
    rb_define_module_function(spans, "enter", spans_enter, 2);
    rb_define_module_function(spans, "tear", spans_tear, 2);
    rb_define_module_function(spans, "leave", spans_leave, 0);
    rb_define_module_function(spans, "point", spans_point, 1);
}
