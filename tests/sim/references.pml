/* The reference protocol of telegrad/_core/references/reference_protocol.py, for one reference and three workers.

Worker 0 owns the value, worker 1 creates it by a remote call, worker 2 is a third. Handles are passed on FORKS - 1
times, between any two of them, and dropped at any time. Letters arrive once each (`ReliableDelivery` ensures that) in
any order, and so do the users' messages: what is on its way is a set of bits. Left out: messages to oneself, deaths and
broken connections, and living workers that were declared dead (the simulation in test_references.py has them all).

BROKEN_G1 and BROKEN_G2 each drop one rule: then the search must find the harm. */

#ifndef FORKS
#define FORKS 5
#endif
#define WORKERS 3
#define AT(worker, fork) ((worker) * FORKS + (fork))

#define ABSENT 0
#define PRESENT 1
#define FREED 2

byte value = ABSENT;

/* On its way: fork 0 goes with the creating call. */
bool call, answer;
bool passing[FORKS], confirm[FORKS], confirmed[FORKS], settled[FORKS], dropped[FORKS], wanted[FORKS], stillborn[FORKS];

/* Who sent a fork, and to whom. */
byte parent[FORKS], holder[FORKS];
byte next = 1;

/* The owner. */
bool owned, made, refused;
byte own_handles;
bool known[FORKS];

/* The users. */
bool shared[WORKERS], sure[WORKERS];
byte handles[WORKERS], fork_of[WORKERS];
bool children[WORKERS * FORKS], parents[WORKERS * FORKS], extras[WORKERS * FORKS];
bool creating, asked;

byte f;        /* a scratch counter, zero between steps */
bool used;     /* likewise */

#define LOOK_FOR(bits, worker) \
    used = false; \
    for (f : 0 .. FORKS - 1) { used = used || bits[AT(worker, f)] } \
    f = 0

inline end_if_unused(worker) {
    LOOK_FOR(children, worker);
#ifdef BROKEN_G2
    used = false;
#endif
    if
#ifdef BROKEN_G1
    :: shared[worker] && handles[worker] == 0 && !used ->
#else
    :: shared[worker] && handles[worker] == 0 && !used && sure[worker] ->
#endif
        shared[worker] = false;
        dropped[fork_of[worker]] = true;
        fork_of[worker] = 0;
        sure[worker] = false
    :: else
    fi;
    used = false
}

inline free_if_unused() {
    LOOK_FOR(known, 0);
    if
    :: owned && made && own_handles == 0 && !used -> owned = false; value = FREED
    :: else
    fi;
    used = false
}

inline want(fork) {
    if
    :: !owned -> assert(!refused); wanted[fork] = true; owned = true
    :: else
    fi
}

inline conclude(worker) {
    sure[worker] = true;
    for (f : 0 .. FORKS - 1) {
        if
        :: parents[AT(worker, f)] -> parents[AT(worker, f)] = false; settled[f] = true
        :: else
        fi;
        if
        :: extras[AT(worker, f)] -> extras[AT(worker, f)] = false; dropped[f] = true
        :: else
        fi
    }
    f = 0;
    end_if_unused(worker)
}

inline on_confirmed(worker, fork) {
    if
    :: shared[worker] && fork_of[worker] == fork && !sure[worker] -> conclude(worker)
    :: else
    fi
}

inline arrive(fork, sender, worker) {
    if
    :: worker == 0 ->
        want(fork);
        own_handles++;
        settled[fork] = true
    :: worker != 0 && !shared[worker] ->
        shared[worker] = true;
        fork_of[worker] = fork;
        handles[worker] = 1;
        sure[worker] = (sender == 0);
        if
        :: sender != 0 -> parents[AT(worker, fork)] = true; confirm[fork] = true
        :: else
        fi
    :: worker != 0 && shared[worker] ->
        handles[worker]++;
        if
        :: sender == 0 && sure[worker] -> dropped[fork] = true
        :: sender == 0 && !sure[worker] -> extras[AT(worker, fork)] = true
        :: sender != 0 && sure[worker] -> settled[fork] = true
        :: sender != 0 && !sure[worker] -> parents[AT(worker, fork)] = true
        fi
    fi
}

inline check() {
    if
    :: value == FREED ->
        assert(own_handles == 0 && handles[1] == 0 && handles[2] == 0);
        for (f : 0 .. FORKS - 1) { assert(!passing[f]) }
        f = 0
    :: else
    fi
}

#define PASS(sender, receiver) \
    :: atomic { next < FORKS && (sender == 0 -> own_handles > 0 : handles[sender] > 0) -> \
        parent[next] = sender; holder[next] = receiver; passing[next] = true; \
        if \
        :: sender == 0 -> known[next] = true \
        :: else -> children[AT(sender, next)] = true \
        fi; \
        next++ }

#define DROP(worker) \
    :: atomic { handles[worker] > 0 -> handles[worker]--; end_if_unused(worker); check() }

#define DELIVER(fork) \
    :: atomic { passing[fork] -> passing[fork] = false; arrive(fork, parent[fork], holder[fork]); check() } \
    :: atomic { confirm[fork] -> confirm[fork] = false; want(fork); known[fork] = true; confirmed[fork] = true } \
    :: atomic { confirmed[fork] -> confirmed[fork] = false; on_confirmed(holder[fork], fork); check() } \
    :: atomic { settled[fork] -> settled[fork] = false; \
        children[AT(parent[fork], fork)] = false; end_if_unused(parent[fork]); check() } \
    :: atomic { dropped[fork] -> dropped[fork] = false; \
        if \
        :: owned && known[fork] -> known[fork] = false; free_if_unused() \
        :: else \
        fi; \
        check() } \
    :: atomic { wanted[fork] -> wanted[fork] = false; \
        if \
        :: !creating -> stillborn[fork] = true \
        :: else -> asked = true \
        fi } \
    :: atomic { stillborn[fork] -> stillborn[fork] = false; \
        if \
        :: owned && made \
        :: else -> assert(!owned); refused = true \
        fi }

active proctype cluster() {
    atomic { shared[1] = true; handles[1] = 1; holder[0] = 1; creating = true; call = true }
    do
    :: atomic { call -> call = false; assert(!refused && value == ABSENT);
        owned = true; made = true; known[0] = true; value = PRESENT; answer = true }
    :: atomic { answer -> answer = false; creating = false;
        if
        :: asked -> asked = false; stillborn[0] = true
        :: else
        fi;
        on_confirmed(1, 0); check() }
    :: atomic { own_handles > 0 -> own_handles--; free_if_unused(); check() }
    DROP(1)
    DROP(2)
    PASS(0, 1)
    PASS(0, 2)
    PASS(1, 0)
    PASS(1, 2)
    PASS(2, 0)
    PASS(2, 1)
    DELIVER(0)
    DELIVER(1)
    DELIVER(2)
#if FORKS > 3
    DELIVER(3)
#endif
#if FORKS > 4
    DELIVER(4)
#endif
    :: else -> break
    od;
    /* Nothing is on its way, and no handle is left. */
    assert(value == FREED && !owned && !shared[1] && !shared[2] && !creating)
}
