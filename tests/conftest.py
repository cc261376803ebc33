import signal

# A shell starts what it puts in the background with SIGINT ignored, and processes hand that on:
# programs that tests start would not hear the ^C that tests send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
