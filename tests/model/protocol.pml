/* The ring's words and what may be done to them: shm_ring/protocol.py and state.py. Included by ring.pml, whose head explains
 * the sizes. M_NAME: a mutant, which must fail. */
#ifndef NS
#define NS 2
#endif
#ifndef NP
#define NP 2
#endif
#ifndef NC
#define NC 1
#endif
#ifndef TEND
#define TEND 2
#endif
#ifndef TI
#define TI 2
#endif
#ifndef PC
#define PC 1
#endif
#ifndef RERUN
#define RERUN 0
#endif
#ifndef KILLS
#define KILLS 0
#endif
#ifndef SC
#define SC 0
#endif
#ifndef FAULTS
#define FAULTS 0
#endif
#ifndef MAXF
#define MAXF 0
#endif
#define END   (TEND*NC)
#define NPS   (NP*(RERUN+1))                 /* the producers of every run */
#ifdef REUSE
#define PARTY(i,r) (NPS+(r))
#define N     (NPS+NC)
#else
#define PARTY(i,r) (NPS+(i)*NC+(r))
#define N     (NPS+NC*TI)
#endif
#define FREE  255
#define GARB  250

#define EMPTY 0
#define WRITING 1
#define QUAR 2
#define REDO 3
#define READY 4
#define READING 5
#define CONSUMED 6
#define POISON 7

/* one slot: the state word (st, own: one store), then seq, epoch, first and last byte of the data */
byte st[NS]; byte own[NS] = FREE; byte sq[NS]; byte sep[NS]; byte lo[NS]; byte hi[NS];
#if MAXF>0
byte fails[NS]; bool tried[NS];              /* the failures word: a count, and whether this try is in it */
byte real[NS];                               /* of the checker: failures that happened */
#endif
/* meta.bin */
byte head, tail, base; byte epoch = 1; byte settled = 1; bool closed;
/* kernel */
byte lock = FREE; bool alive[N+2]; byte pend[NPS];
/* trainer-internal (its own process group, not the ring) */
bool doomed[TI]; byte eps[TI]; byte cnt[NC*TI]; byte ckpt; byte cur;
/* launch.py: a party quit by poison; everybody is to end; runs begun again */
bool quit, ending; byte reruns;
/* bookkeeping of the checker */
byte pcr, flt, scr, kills, gslot; bool acked[END]; byte auxnext;

#if NS==1
#define ANY(p) (p(0))
#elif NS==2
#define ANY(p) (p(0) || p(1))
#elif NS==3
#define ANY(p) (p(0) || p(1) || p(2))
#else
#define ANY(p) (p(0) || p(1) || p(2) || p(3))
#endif
#if NC==1
#define ALLCNT(i,T) (cnt[i]>=(T))
#define GONE(i)     (!alive[PARTY(i,0)])
#elif NC==2
#define ALLCNT(i,T) (cnt[(i)*NC]>=(T) && cnt[(i)*NC+1]>=(T))
#define GONE(i)     (!alive[PARTY(i,0)] && !alive[PARTY(i,1)])
#else
#define ALLCNT(i,T) (cnt[(i)*NC]>=(T) && cnt[(i)*NC+1]>=(T) && cnt[(i)*NC+2]>=(T))
#define GONE(i)     (!alive[PARTY(i,0)] && !alive[PARTY(i,1)] && !alive[PARTY(i,2)])
#endif
#if NC==1 || defined(NOBARRIER)
#define BARRIER(i,T) (true)
#else
#define BARRIER(i,T) ALLCNT(i,T)
#endif

#define FREEST(k)  (st[k]==EMPTY || st[k]==CONSUMED)   /* protocol.free_slot */
#define TRUSTED(k) (st[k]!=EMPTY && st[k]!=CONSUMED)
#ifdef M_ANY_EPOCH
#define MINE(k)    (TRUSTED(k))
#else
#define MINE(k)    (TRUSTED(k) && sep[k]==epoch)
#endif
#define ISREDO(k)  (st[k]==REDO && sep[k]==epoch)                  /* protocol.lowest_redo */
#define WANTED(k)  (st[k]==READY && sep[k]==epoch && sq[k]==want)  /* protocol.wanted */
#define BAD(k)     (st[k]==POISON && sep[k]==epoch)
#define POISONED   (ANY(BAD))
#define DEAD(k)    (own[k]<N && !alive[own[k]])
#ifdef M_NO_QUARANTINE
#define SAFE(k)    (true)
#else
#define SAFE(k)    (pend[own[k]]==0)
#endif
#ifdef M_HEARTBEAT
#define RW(k)      (st[k]==WRITING && own[k]!=me)
#else
#define RW(k)      (st[k]==WRITING && DEAD(k))
#endif
#define RQ(k)      (st[k]==QUAR && SAFE(k))
#define RR(k)      (st[k]==READING && DEAD(k))
#define REAPABLE(k) (RW(k) || RQ(k) || RR(k))
#define HELD(k)    (st[k]==WRITING || st[k]==QUAR || st[k]==READING)
#define AHEAD(k)   (MINE(k) && sq[k]>=head)
#define ATTAIL(k)  (MINE(k) && sq[k]<=tail)
#define OLD(k)     (sep[k]!=epoch && (st[k]==READY || st[k]==CONSUMED || st[k]==REDO || st[k]==POISON))
#define OLDANY(k)  (sep[k]!=epoch && st[k]!=EMPTY)

#ifdef M_OWN_FINISH
#define UNSETTLED (false)
#elif defined(M_NO_MARK)       /* "sees a slot of an older epoch" */
#define UNSETTLED (ANY(OLD))
#elif defined(M_NO_MARK2)      /* the same, counting the slots that keep their word: see CLAIM */
#define UNSETTLED (false)
#else
#define UNSETTLED (settled!=epoch)
#endif
#ifdef M_NO_DERIVE
#define LAG (tail<head && !ANY(ATTAIL))
#else
#define LAG (ANY(AHEAD) || (tail<head && !ANY(ATTAIL)))
#endif
#define MUSTFIX (UNSETTLED || LAG)

#ifdef FINE
#define BEG {
#define ENTER(c) atomic { lock==FREE && (c) -> lock=me }
#else
#define BEG atomic {
#define ENTER(c) lock==FREE && (c) -> lock=me
#endif
#define FIN }
#define UNLOCK lock=FREE

#ifdef M_NO_RELEASE
#define KERNEL skip
#else
#define KERNEL if :: lock==me -> lock=FREE :: else fi
#endif
#ifdef ALONE
#define MORTAL (false)
#else
#define MORTAL (inc<TI-1)
#endif
#define MAYDIE ((me<NPS && pcr<PC) || (me>=NPS && me<N && (doomed[inc] || MORTAL)) || (me<N && ending) || (me==N && scr<SC))
#define DIE    alive[me]=false; if :: me==N -> scr++ :: me<NPS && !ending -> pcr++ :: me>=NPS && me<N -> doomed[inc]=true \
               :: else fi; KERNEL; goto dead
#define CRASH  if :: atomic { MAYDIE -> DIE } :: skip fi

/* no gap and no double: fresh claims of one epoch are base, base+1, base+2 ... */
#ifdef NOAUX
#define AUXBASE auxnext=0
#define AUXCLAIM(k) auxnext=0
#else
#define AUXBASE auxnext=base
#define AUXCLAIM(k) assert(sq[k]==auxnext); auxnext++
#endif

#define SET(k,S,O)  d_step { st[k]=S; own[k]=O }
/* the content of a free slot is worth nothing: cleared here so that equal states look equal */
#if MAXF>0 && !defined(M_FAILS_KEPT)
#define NOFAILS(k)  fails[k]=0; tried[k]=false; real[k]=0
#elif MAXF>0
#define NOFAILS(k)  tried[k]=false; real[k]=0
#else
#define NOFAILS(k)  skip
#endif
#define SETF(k,S)   d_step { st[k]=S; own[k]=FREE; sq[k]=0; sep[k]=0; lo[k]=0; hi[k]=0; NOFAILS(k) }
#if defined(M_NO_MARK) || defined(M_NO_MARK2)
#define SETC(k)     st[k]=CONSUMED; own[k]=FREE; sq[k]=0; lo[k]=0; hi[k]=0
#else
#define SETC(k)     SETF(k,CONSUMED)
#endif
/* a try ends badly: POISON at the MAXF-th failure of the seq, else S */
#define OTHERWISE(k,S) if :: S==REDO -> d_step { st[k]=REDO; own[k]=FREE; lo[k]=0; hi[k]=0 } :: else -> SET(k,S,FREE) fi
#if MAXF>0
#ifdef M_COUNT_TWICE
#define COUNTED(k)  false
#else
#define COUNTED(k)  tried[k]
#endif
inline FAIL(x,S) {                           /* protocol.fail: the count is one store, the word another */
  d_step { if :: COUNTED(x) -> skip :: else -> fails[x]++ fi; tried[x]=true }; CRASH;
  real[x]++;
  if
  :: fails[x]>=MAXF -> assert(real[x]==MAXF); d_step { st[x]=POISON; own[x]=FREE; lo[x]=0; hi[x]=0 }
  :: else -> assert(real[x]==fails[x]); OTHERWISE(x,S)
  fi
}
#define NEWTRY(k)   tried[k]=false
#else
#define FAIL(k,S)   OTHERWISE(k,S)
#define NEWTRY(k)   skip
#endif

/* whoever holds CTRL: finish a rewind, then derive head and tail */
inline FINISH() {                            /* protocol.finish_rewind */
  k=0;
  do
  :: k<NS ->
     if
     :: OLD(k) -> SETF(k,EMPTY); CRASH
#ifdef M_EMPTY_WRITING
     :: st[k]==WRITING && sep[k]!=epoch -> SETF(k,EMPTY); CRASH
#endif
#ifdef M_EMPTY_READING
     :: st[k]==READING && sep[k]!=epoch -> SETF(k,EMPTY); CRASH
#endif
     :: else
     fi; k++
  :: else -> k=0; break
  od;
#ifndef M_HEAD_KEPT
  head=base; CRASH;
#endif
  tail=base; CRASH; closed=false; CRASH;
  settled=epoch; CRASH
}
inline DERIVE() {                            /* protocol.derive; protocol.done calls it too: here the next holder does */
#ifndef M_NO_DERIVE
  d_step { k=0; h=head; do :: k<NS -> if :: MINE(k) && sq[k]>=h -> h=sq[k]+1 :: else fi; k++ :: else -> break od; k=0 };
  if :: h!=head -> head=h; CRASH :: else fi;
#endif
  d_step { k=0; h=head; do :: k<NS -> if :: MINE(k) && sq[k]<h -> h=sq[k] :: else fi; k++ :: else -> break od; k=0 };
  if :: h!=tail -> tail=h; CRASH :: else fi;
  h=0
}
inline FIX() {                               /* protocol.settle */
  if :: UNSETTLED -> FINISH() :: else fi;
  DERIVE();
  assert(!MUSTFIX)
}
inline NEWEPOCH() { d_step { epoch++; AUXBASE; k=0; do :: k<END -> acked[k]=false; k++ :: else -> break od; k=0 }; CRASH }
inline REWIND(B) {                           /* protocol.rewind */
#ifdef M_EPOCH_FIRST
  NEWEPOCH(); base=B; CRASH;
#else
  base=B; CRASH; NEWEPOCH();
#endif
#if defined(M_OWN_FINISH) || defined(M_NO_MARK) || defined(M_NO_MARK2)
  FINISH();
#endif
  FIX()
}
inline REAPONE() {                           /* protocol.reap_one; protocol.reap is several of them in one hold */
  d_step { k=0; do :: k<NS && !REAPABLE(k) -> k++ :: else -> break od; h=0 };
  if
  :: k<NS && RW(k) -> SET(k,QUAR,own[k])
  :: k<NS && RQ(k) && sep[k]==epoch -> FAIL(k,REDO)
  :: k<NS && RQ(k) && sep[k]!=epoch -> SETF(k,EMPTY)
  :: k<NS && RR(k) && sep[k]==epoch -> FAIL(k,READY)
  :: k<NS && RR(k) && sep[k]!=epoch -> SETF(k,EMPTY)
  :: else
  fi;
  k=0
}
inline CLAIM() {                             /* protocol.claim */
#ifdef M_NO_MARK2
  if :: ANY(OLDANY) -> FINISH(); FIX() :: else fi;
#endif
  d_step {
    s=FREE; k=0;
    do
    :: k<NS -> if :: ISREDO(k) -> if :: s==FREE -> s=k :: else -> if :: sq[k]<sq[s] -> s=k :: else fi fi :: else fi; k++
    :: else -> break
    od;
    k=0
  };
#ifdef M_NO_CLAIM_EPOCH
  mye=epoch;
#endif
  if
  :: s!=FREE ->
#ifdef M_REDO_FRESH
     if :: head<END -> sq[s]=head; head++ :: else fi;
#endif
     d_step { st[s]=WRITING; own[s]=me; NEWTRY(s) }; CRASH
  :: else ->
     d_step { k=0; do :: k<NS && s==FREE -> if :: FREEST(k) -> s=k :: else fi; k++ :: else -> break od; k=0; sq[s]=head };
#ifndef M_NO_CLAIM_EPOCH
     sep[s]=epoch;
#endif
     CRASH;
#ifdef M_HEAD_FIRST
     head++; CRASH;
     d_step { st[s]=WRITING; own[s]=me; AUXCLAIM(s); NEWTRY(s) }; CRASH
#else
     d_step { st[s]=WRITING; own[s]=me; AUXCLAIM(s); NEWTRY(s) }; CRASH;
     head++; CRASH
#endif
  fi
}
inline LETGO() {                             /* protocol.publish, or after an exception (ab) protocol.abort */
  assert(st[s]==WRITING && own[s]==me);
#ifdef M_NO_CLAIM_EPOCH
  sep[s]=mye;                                /* the seal; the token knows its epoch */
#endif
  if
#ifdef M_STALE_PUBLISH
  :: sep[s]!=epoch && !ab -> d_step { sep[s]=epoch; st[s]=READY; own[s]=FREE }
  :: sep[s]!=epoch && ab -> SETF(s,EMPTY)
#else
  :: sep[s]!=epoch -> SETF(s,EMPTY)          /* old epoch: refused, released */
#endif
  :: sep[s]==epoch && ab -> FAIL(s,REDO)
  :: sep[s]==epoch && !ab -> SET(s,READY,FREE)
  fi
}

/* what every waiting party may do */
#define HOUSE :: BEG ENTER(MUSTFIX); CRASH; FIX(); UNLOCK; FIN
#define REAP  :: BEG ENTER(!MUSTFIX && ANY(REAPABLE)); CRASH; REAPONE(); CRASH; UNLOCK; FIN
