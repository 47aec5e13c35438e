/* The ring's protocol as a Spin model: NP target workers (P), NC trainer ranks (C), who starts a run again (S), launch.py
 * (init), and copies that land late (G). It stands for shm_ring/protocol.py: a comment `protocol.NAME` says which function.
 * No time-outs and no polling: a party enters only when there is something to do, so "all wait for ever" is an invalid end
 * state, which Spin reports. tests/model/test_model.py has the configurations that must pass and the mutants that must fail:
 *   spin -a -DNS=2 -DNP=2 -DNC=1 -DTEND=2 -DTI=2 -DPC=1 ring.pml
 *   gcc -O1 -w -DSAFETY -DCOLLAPSE -DVECTORSZ=1024 -DMEMLIM=10000 -o pan pan.c && ./pan -m5000000
 * "errors: 0" without "max search depth too small" or "Search not completed" is a full search. The trail of a failure:
 *   spin -p -t -k ring.pml.trail <the same -D flags> ring.pml
 * No livelock: gcc -DNP in place of -DSAFETY, then ./pan -l: no run is infinite, whatever the scheduler does.
 *
 * Sizes:  NS slots (1-4), NP producers (1-3), NC ranks (1-3), TEND slots per rank (end_seq = TEND*NC), PC producer deaths
 *         (< NP unless KILLS), TI trainer incarnations (all but the last may die anywhere, the rewind included), FAULTS aborts
 *         + wrong sums + give-backs, MAXF failures of one seq are POISON (0: never), RERUN more runs on the ring of one that
 *         closed, quit by poison or died whole, KILLS runs of which everybody is killed, SC deaths of the starter.
 * Switches: FINE (each store under CTRL is its own step; default: a hold of CTRL is one atomic step with crash points inside,
 *         sound because every state word is only touched under CTRL), OVERLAP (ranks other than 0 of the old group may live
 *         on beside the new one), REUSE (ranks take the party records of the dead), NOBARRIER (no all-reduce between slots),
 *         NOAUX (no gap/double assertion: what does a mutant do end to end), ALONE (launch.py restarts no trainers, and does
 *         not end the half that a poisoned one leaves behind while the POISON is there; trainers do not die).
 * Checked: owner at publish, abort, done, give-back; no torn read, by old ranks too; fresh claims of one epoch are base,
 *   base+1, ... (no gap, no double); acknowledged at most once per epoch, and at the end every seq of [base, end) in the
 *   last epoch; head = tail = end; CTRL free; every slot EMPTY or CONSUMED after the last reap; housekeeping converges
 *   (assert(!MUSTFIX)); POISON at exactly MAXF failures of one seq, and then all parties end; no deadlock.
 * Not in the model: joining; two slots held by one producer (so protocol.release_party, which is abort and give_back of each
 *   slot); slots of more than two cells; damage (protocol.seal_fits, always true here); weak memory; semaphores; time.
 */
#include "protocol.pml"

proctype P(byte me) {
  byte s = FREE, k, h, mysq, inc; bool ab;
#ifdef M_NO_CLAIM_EPOCH
  byte mye;
#endif
  do
  HOUSE
  REAP
  :: ending -> break
#ifndef M_DEAF_P
  :: BEG ENTER(!MUSTFIX && POISONED); quit=true; UNLOCK; break; FIN
#endif
  :: BEG ENTER(!MUSTFIX && !POISONED && (ANY(ISREDO) || (head<END && ANY(FREEST)))); CRASH;
     CLAIM();
     d_step { mysq=sq[s]; lock=FREE };
     FIN;
     CRASH;
     atomic { pend[me]=s+1; lo[s]=mysq }; CRASH;      /* the copy starts */
#ifdef M_FLAG_FIRST
     do
     HOUSE
     :: BEG ENTER(!MUSTFIX); SET(s,READY,FREE); UNLOCK; break; FIN
     od; skip;
     d_step { hi[s]=mysq; pend[me]=0 };
#else
     if
#if FAULTS>0
     :: atomic { flt<FAULTS -> flt++; ab=true;        /* an exception while the copy is in flight */
#ifdef M_ABORT_EARLY
          gslot=s+1; pend[me]=0 }
#else
          pend[me]=0 }                                /* wait for the copy's event all the same */
#endif
#endif
     :: d_step { hi[s]=mysq; pend[me]=0 }             /* the copy's event */
     fi;
     CRASH;
     do
     HOUSE
     :: BEG ENTER(!MUSTFIX); CRASH; LETGO(); CRASH; UNLOCK; break; FIN
     od; skip;
#endif
     skip; d_step { ab=false; s=FREE;
#ifdef M_EXIT_EARLY
       k=(mysq==END-1 -> 1 : 0);
#endif
       mysq=0 };
     CRASH
#ifdef M_EXIT_EARLY
     ; if :: k==1 -> break :: else fi
#endif
  :: BEG ENTER(!MUSTFIX && closed && tail==END); UNLOCK; break; FIN
  od;
  alive[me]=false;
dead: skip
}

proctype C(byte inc; byte r) {
  byte me, s = FREE, k, h, a, want, t, myep; bool bad;
  me=PARTY(inc,r);
  if
  :: r==0 ->
     do
     HOUSE
     :: BEG ENTER(!MUSTFIX); CRASH;
        t=0; do :: t<ckpt -> t++ :: break od; skip;   /* any checkpoint made so far */
        REWIND(t*NC); myep=epoch; UNLOCK; break; FIN
     :: doomed[inc] || ending -> goto die
     od;
     CRASH;
     d_step { eps[inc]=myep; k=0; do :: k<NC -> cnt[inc*NC+k]=t; k++ :: else -> break od; k=0 }
  :: else ->
     if :: eps[inc]!=0 -> d_step { myep=eps[inc]; t=cnt[inc*NC+r] } :: doomed[inc] || ending -> goto die fi
  fi;
  do
  :: t<TEND ->
     want=t*NC+r;
again:
     do
     HOUSE
     REAP
     :: BEG ENTER(!MUSTFIX && epoch!=myep); UNLOCK; goto refused; FIN
     :: BEG ENTER(!MUSTFIX && epoch==myep && BARRIER(inc,t) && ANY(WANTED)); CRASH;      /* protocol.take */
        d_step { s=0; do :: !WANTED(s) -> s++ :: else -> break od; k=0 };
        d_step { st[s]=READING; own[s]=me; NEWTRY(s) }; CRASH; UNLOCK; break; FIN
#ifndef M_DEAF_C
     :: BEG ENTER(!MUSTFIX && epoch==myep && BARRIER(inc,t) && POISONED && !ANY(WANTED));
        d_step { quit=true; doomed[inc]=true }; UNLOCK; goto die; FIN
#endif
     :: doomed[inc] || ending -> goto die
     od;
     CRASH;
     a=lo[s]; CRASH;
     d_step { assert(a==want && hi[s]==want); a=0 }; CRASH;   /* the copy off the slot has ended */
#if FAULTS>0
     if :: atomic { flt<FAULTS -> flt++; bad=true } :: skip fi;
#endif
     do
     HOUSE
     :: BEG ENTER(!MUSTFIX); CRASH;
        assert(st[s]==READING && own[s]==me && sq[s]==want);
        if
        :: sep[s]!=epoch -> SETF(s,EMPTY); CRASH; UNLOCK; goto refused
        :: sep[s]==epoch && bad ->
           if
           :: FAIL(s,REDO)                                    /* protocol.reject */
           :: SET(s,READY,FREE)                               /* protocol.give_back */
           fi;
           CRASH; UNLOCK; bad=false; s=FREE; goto again
        :: sep[s]==epoch && !bad ->                           /* protocol.done */
           d_step { assert(!acked[want]); acked[want]=true; SETC(s) };
           CRASH; UNLOCK; break
        fi; FIN
     od; skip;
     d_step { s=FREE; t++; want=0; cnt[inc*NC+r]=t; if :: t>ckpt && ALLCNT(inc,t) -> ckpt=t :: else fi };
     CRASH
  :: else -> break
  od;
  if
  :: r==0 ->
     do
     HOUSE
     REAP
     :: BEG ENTER(!MUSTFIX && epoch!=myep); UNLOCK; goto refused; FIN
     :: BEG ENTER(!MUSTFIX && epoch==myep && ALLCNT(inc,TEND)); CRASH;
        closed=true; CRASH; UNLOCK; break; FIN                /* protocol.close */
     :: doomed[inc] || ending -> goto die
     od;
     CRASH
  :: else
  fi;
  alive[me]=false; goto dead;
refused: skip;
  d_step { assert(doomed[inc]); alive[me]=false }; goto dead;
die:
  alive[me]=false;
dead: skip
}

#define STARTP skip; d_step { k=0; do :: k<NP -> alive[reruns*NP+k]=true; k++ :: else -> break od; k=0 }; \
  do :: k<NP -> run P(reruns*NP+k); k++ :: else -> k=0; break od
#define STARTC skip; d_step { k=0; do :: k<NC -> alive[PARTY(cur,k)]=true; k++ :: else -> break od; k=0 }; \
  do :: k<NC -> run C(cur,k); k++ :: else -> k=0; break od

/* a run on the ring of an ended one: shm_ring.clear_closed, before it starts anything. Its death: the user tries again */
proctype S() {
  byte me = N, k, h, inc;
  BEG ENTER(true); CRASH;
#if defined(M_TAKEOVER_KEEPS)
  FIX(); closed=false; CRASH;
#elif !defined(M_CLOSED_KEPT)
  FIX(); REWIND(base);                       /* the new epoch voids what the ended run left, its POISON too */
#endif
  assert(!POISONED);
  UNLOCK; FIN;
  CRASH;
  atomic { reruns++; cur++; quit=false; ending=false; STARTP; STARTC };
dead: skip
}

/* the copy of a dead producer lands late */
#define LAND(x) :: d_step { pend[x]>0 && !alive[x] -> hi[pend[x]-1]=GARB; pend[x]=0 }
proctype G() {
end: do
  LAND(0)
#if NPS>1
  LAND(1)
#endif
#if NPS>2
  LAND(2)
#endif
#if NPS>3
  LAND(3)
#endif
#if NPS>4
  LAND(4)
  LAND(NPS-1)
#endif
#ifdef M_ABORT_EARLY
  :: d_step { gslot>0 -> hi[gslot-1]=GARB; gslot=0 }
#endif
  od
}

#ifdef M_OVERLAP0
#define MAYSTART (true)
#elif defined(OVERLAP)
#define MAYSTART (!alive[PARTY(cur,0)])
#elif defined(REUSE) && !defined(M_REUSE)
#define NAMED(k) (own[k]>=NPS && own[k]<N)
#define MAYSTART (GONE(cur) && !ANY(NAMED))
#else
#define MAYSTART (GONE(cur))
#endif
#define OVER    (closed && settled==epoch)
#define MORE    (reruns<RERUN && cur<TI-1)
init {
  byte k, h, me, inc;
  atomic { run G(); STARTP; STARTC };
  do
#ifdef ALONE
  :: quit && !ending && !POISONED -> ending=true
#else
  :: quit && !ending -> ending=true                           /* one half has failed: launch.py ends the other */
  :: atomic { doomed[cur] && cur<TI-1 && !closed && !quit && !ending && MAYSTART -> cur++; STARTC }
#endif
#if KILLS>0
  :: atomic { kills<KILLS && MORE && !ending -> kills++; ending=true }
#endif
#if RERUN>0
  :: atomic { _nr_pr==2 && MORE && (OVER || ending || quit) -> ending=true; run S() }
#endif
  :: atomic { _nr_pr==2 && !MORE && (OVER || ending || quit) -> break }
  od;
  me=N+1;
  do       /* the last reap, then nothing may be left; of a run that ended early nothing may be held */
  HOUSE
  REAP
  :: atomic { lock==FREE && !MUSTFIX && !ANY(REAPABLE) && !ANY(HELD) && (!OVER || !ANY(TRUSTED)) -> break }
  od;
  skip;
  if
  :: OVER ->
     d_step {
       assert(lock==FREE && head==END && tail==END && base<=END);
       k=base; do :: k<END -> assert(acked[k]); k++ :: else -> break od;
       k=0
     }
  :: else ->
#ifdef ALONE
     assert(POISONED || ending)
#else
     assert(quit || ending)
#endif
  fi;
dead: skip
}
