/*
 * Calls CRuby's allocation functions a known number of times, inside the traced process.
 *
 *   MallocWitness.malloc size, count    ruby_xmalloc; the memory is kept, and never touched
 *   MallocWitness.malloc2 n, size, count    ruby_xmalloc2
 *   MallocWitness.calloc size, count    ruby_xcalloc
 *   MallocWitness.realloc size          ruby_xrealloc of all that is kept; returns how many
 *   MallocWitness.free                  ruby_xfree of all that is kept; returns how many
 *   MallocWitness.churn size, count     as many pairs of ruby_xmalloc and ruby_xfree
 */
#include <ruby.h>

enum { MOST = 1 << 20 };

static void *kept[MOST];
static size_t count;

static void keep(void *memory)
{
    if (count == MOST) rb_raise(rb_eRuntimeError, "too many");
    kept[count++] = memory;
}

static VALUE witness_malloc(VALUE self, VALUE size, VALUE times)
{
    for (size_t i = NUM2SIZET(times); i > 0; i--) keep(ruby_xmalloc(NUM2SIZET(size)));
    return Qnil;
}

static VALUE witness_malloc2(VALUE self, VALUE n, VALUE size, VALUE times)
{
    for (size_t i = NUM2SIZET(times); i > 0; i--) keep(ruby_xmalloc2(NUM2SIZET(n), NUM2SIZET(size)));
    return Qnil;
}

static VALUE witness_calloc(VALUE self, VALUE size, VALUE times)
{
    for (size_t i = NUM2SIZET(times); i > 0; i--) keep(ruby_xcalloc(1, NUM2SIZET(size)));
    return Qnil;
}

static VALUE witness_realloc(VALUE self, VALUE size)
{
    for (size_t i = 0; i < count; i++) kept[i] = ruby_xrealloc(kept[i], NUM2SIZET(size));
    return SIZET2NUM(count);
}

static VALUE witness_free(VALUE self)
{
    size_t freed = count;
    while (count > 0) ruby_xfree(kept[--count]);
    return SIZET2NUM(freed);
}

static VALUE witness_churn(VALUE self, VALUE size, VALUE times)
{
    for (size_t i = NUM2SIZET(times); i > 0; i--) ruby_xfree(ruby_xmalloc(NUM2SIZET(size)));
    return Qnil;
}

void Init_malloc_witness(void)
{
    VALUE witness = rb_define_module("MallocWitness");
    rb_define_module_function(witness, "malloc", witness_malloc, 2);
    rb_define_module_function(witness, "malloc2", witness_malloc2, 3);
    rb_define_module_function(witness, "calloc", witness_calloc, 2);
    rb_define_module_function(witness, "realloc", witness_realloc, 1);
    rb_define_module_function(witness, "free", witness_free, 0);
    rb_define_module_function(witness, "churn", witness_churn, 2);
}
