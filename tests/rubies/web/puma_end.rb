# CRuby 3.3 (thread.c at v3_3_8, thread_io_wake_pending_closer): IO#close never returns if a signal handler is in a write to that pipe, because
# the handler cannot lock the mutex by which it would be removed from the users of the pipe. Puma's handlers stop it that way (puma/puma#3677).
# A thread can lock the mutex.
require "puma/server"

Puma::Server.prepend(Module.new { private def notify_safely(message) = Thread.new { super }.join })
