-- The quota law, in one script so that each operation is atomic. chairlift_gateway/quota/law.py says
-- the same in Python, with the reasons; a test holds the two together.
--
-- KEYS 1 account  2 leases  3 late (all three of one holder)  4 leasing  5 limits  6 idle
--      7 rate of this holder  8 rate of the holder whose limits count where it has none
-- ARGV 1 operation  2 holder  3 the holder whose limits count where it has none  4... by operation
-- Levels are in units of 1/60000 token or request: a rate per minute times milliseconds, whole numbers.
-- What takes time here is the number of commands: what can go in one goes in one.

local call = redis.call
local ACCOUNT, LEASES, LATE, LEASING, LIMITS, IDLE = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local RATE, FALLBACK_RATE = KEYS[7], KEYS[8]
local OPERATION, HOLDER, FALLBACK = ARGV[1], ARGV[2], ARGV[3]
local UNIT = 60000
local LATE_MS = 600000
local IDLE_MS = 3600000
-- Of an account, whatever is owed: a year.
local LONGEST_MS = 31536000000
-- Numbers of 1e17 and more are written with an exponent, which commands do not take.
local MAX_TOKENS = 10000000000
local SWEPT_AT_ONCE = 1000

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- Limits -------------------------------------------------------------------------------------------

local texts = call('HMGET', LIMITS, HOLDER, FALLBACK)
local text = texts[1] or texts[2]
local is_there = text and true or false
local is_read, limits = pcall(cjson.decode, text or '')
if not is_read or type(limits) ~= 'table' then text, limits = nil, {} end

local function bound(name)
  if type(limits[name]) == 'number' then return limits[name] end
end

local token_rate, request_rate = bound('tokens_per_minute'), bound('requests_per_minute')
local burst_ms = bound('burst_ms') or 30000
local borrows = limits.when_idle == 'borrow'

-- While the pool is congested fewer tokens may be in force; never more than the limits say. Read in
-- any case, so that a probe, whose limits may be none, finds out that it must not be.
local stated_rate, lowered = token_rate, tonumber(call('GET', texts[1] and RATE or FALLBACK_RATE))
if token_rate and lowered and lowered >= 1 and lowered < token_rate then
  limits.lowered_from, token_rate = token_rate, math.floor(lowered)
  limits.tokens_per_minute = token_rate
  text = cjson.encode(limits)
end

local function capacity(rate) return math.max(UNIT, rate * burst_ms) end

-- State --------------------------------------------------------------------------------------------

-- The reservation of ARGV[4] is read along; for other operations the field does not exist.
local state =
  call('HMGET', ACCOUNT, 'at', 'tokens', 'requests', 'used', 'r:' .. (ARGV[4] or ''), 'reserved')
local at, used = tonumber(state[1]) or now, tonumber(state[4]) or 0
-- What live reservations hold, all together: what the holder still has to get.
local reserved = tonumber(state[6]) or 0

local function refilled(level, rate)
  if not rate then return nil end
  local full = capacity(rate)
  level = tonumber(level) or full
  return math.min(full, level + math.max(0, now - at) * rate)
end

local tokens, requests = refilled(state[2], token_rate), refilled(state[3], request_rate)

local function bounded(num_tokens) return math.max(0, math.min(MAX_TOKENS, num_tokens)) end

local function take(num_tokens)
  if not tokens then return end
  local full = capacity(token_rate)
  local most_owed = borrows and capacity(stated_rate) or MAX_TOKENS * UNIT
  tokens = math.max(-most_owed, math.min(full, tokens - num_tokens * UNIT))
end

-- A reservation is its charge. 'x' before it: the lease expired, and the charge counts as used; 's':
-- it was settled. After the colon, when that is forgotten.
local function reservation(value)
  if not value then return 'none', 0 end
  local kind, charge, until_ms = string.match(value, '^([xs]?)(%d*):?(%d*)$')
  if kind == '' then return 'live', tonumber(charge) end
  if tonumber(until_ms) <= now then return 'none', 0 end
  if kind == 's' then return 'settled', 0 end
  return 'expired', tonumber(charge)
end

local function remember(id, value)
  local until_ms = now + LATE_MS
  call('HSET', ACCOUNT, 'r:' .. id, value .. ':' .. string.format('%.0f', until_ms))
  call('ZADD', LATE, until_ms, id)
  call('ZADD', LEASING, 'LT', until_ms, HOLDER)
end

local function lease(id, charge, lease_ms)
  call('HSET', ACCOUNT, 'r:' .. id, charge)
  call('ZADD', LEASES, now + lease_ms, id)
  call('ZADD', LEASING, 'LT', now + lease_ms, HOLDER)
end

local function sweep_leases()
  local first = call('ZRANGE', LEASES, 0, 0, 'WITHSCORES')[2]
  if not first or tonumber(first) > now then return end
  for _, id in ipairs(call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, SWEPT_AT_ONCE)) do
    local _, charge = reservation(call('HGET', ACCOUNT, 'r:' .. id))
    call('ZREM', LEASES, id)
    remember(id, 'x' .. charge)
    used, reserved = used + charge, reserved - charge
    if id == ARGV[4] then state[5] = call('HGET', ACCOUNT, 'r:' .. id) end
  end
end

local num_leases

-- The last that is done before the answer.
local function save()
  num_leases = call('ZCARD', LEASES)
  -- A gateway of another release may have ended a lease, and counted nothing.
  reserved = num_leases == 0 and 0 or math.max(0, reserved)
  local ttl, values = IDLE_MS, {'at', now, 'used', used, 'reserved', reserved}
  -- A limit that comes back begins with a full bucket.
  if tokens then
    values[7], values[8] = 'tokens', tokens
    -- A debt outlives the account's rest.
    if tokens < 0 and token_rate > 0 then
      ttl = math.min(LONGEST_MS, ttl + math.ceil(-tokens / token_rate))
    end
  elseif state[2] then call('HDEL', ACCOUNT, 'tokens') end
  if requests then
    values[#values + 1] = 'requests'
    values[#values + 1] = requests
  elseif state[3] then call('HDEL', ACCOUNT, 'requests') end
  call('HSET', ACCOUNT, unpack(values))
  call('PEXPIRE', ACCOUNT, ttl)
  return ttl
end

local function reply(status, detail)
  local left = tokens and math.floor(tokens / UNIT) or ''
  local requests_left = requests and math.floor(requests / UNIT) or ''
  return {status, detail, left, requests_left, num_leases or call('ZCARD', LEASES), text or ''}
end

-- Operations ---------------------------------------------------------------------------------------

local function wait_ms(missing, rate)
  if rate <= 0 then return UNIT end
  return math.ceil(missing / rate)
end

local function refusal(cost)
  local concurrency = bound('concurrency')
  if concurrency and call('ZCARD', LEASES) >= concurrency then return 'concurrency', 1000 end
  if requests and (request_rate <= 0 or requests < UNIT) then
    return 'requests', wait_ms(UNIT - requests, request_rate)
  end
  if not tokens or (borrows and call('EXISTS', IDLE) == 1) then return nil end
  local needed = math.min(cost * UNIT, capacity(token_rate))
  if token_rate <= 0 or (cost > 0 and tokens < needed) then
    return 'tokens', wait_ms(needed - tokens, token_rate)
  end
end

local function reserve(id, cost, lease_ms)
  if not text then return reply('unknown', is_there and 1 or 0) end
  sweep_leases()
  local kind, charge = reservation(state[5])
  if kind ~= 'none' then
    save()
    return reply(kind == 'live' and 'admitted' or 'gone', charge)
  end
  local reason, retry_ms = refusal(cost)
  if reason then
    call('HINCRBY', ACCOUNT, 'refused', 1)
    save()
    return reply(reason, retry_ms)
  end
  charge = cost
  if tokens and borrows then
    charge = math.min(cost, math.max(0, math.floor((tokens + capacity(stated_rate)) / UNIT)))
  end
  take(charge)
  reserved = reserved + charge
  if requests then requests = requests - UNIT end
  lease(id, charge, lease_ms)
  call('PEXPIRE', LEASES, save())
  return reply('admitted', charge)
end

local function settle(id, num_used, may_be_unknown)
  sweep_leases()
  local kind, charge = reservation(state[5])
  if kind == 'settled' or (kind == 'none' and not may_be_unknown) then
    save()
    return reply('gone', 0)
  end
  take(num_used - charge)
  used = used + num_used
  if kind == 'expired' then used = used - charge end
  if kind == 'live' then
    reserved = reserved - charge
    call('ZREM', LEASES, id)
  end
  if may_be_unknown then remember(id, 's')
  else call('HDEL', ACCOUNT, 'r:' .. id) end
  local ttl = save()
  if may_be_unknown then call('PEXPIRE', LATE, ttl) end
  return reply('settled', charge)
end

local function renew(lease_ms)
  sweep_leases()
  for index = 5, #ARGV, 3 do
    local id, charge, num_used = ARGV[index], tonumber(ARGV[index + 1]), tonumber(ARGV[index + 2])
    local kind, held = reservation(call('HGET', ACCOUNT, 'r:' .. id))
    if kind ~= 'settled' then
      if kind ~= 'none' then charge = held end
      charge = bounded(math.max(charge, num_used))
      if kind == 'expired' then
        used = used - held
        call('ZREM', LATE, id)
      end
      take(charge - held)
      reserved = reserved + charge - (kind == 'live' and held or 0)
      lease(id, charge, lease_ms)
    end
  end
  call('PEXPIRE', LEASES, save())
  return reply('renewed', 0)
end

-- The only one that forgets, and says when this holder must be looked at again.
local function sweep()
  sweep_leases()
  for _, id in ipairs(call('ZRANGEBYSCORE', LATE, '-inf', now, 'LIMIT', 0, SWEPT_AT_ONCE)) do
    call('ZREM', LATE, id)
    -- One that was reserved anew is no concern of its predecessor's.
    if reservation(call('HGET', ACCOUNT, 'r:' .. id)) == 'none' then
      call('HDEL', ACCOUNT, 'r:' .. id)
    end
  end
  call('PEXPIRE', LATE, save())
  local next_ms
  for _, key in ipairs({LEASES, LATE}) do
    local first = tonumber(call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
    if first and (not next_ms or first < next_ms) then next_ms = first end
  end
  if next_ms then call('ZADD', LEASING, next_ms, HOLDER) else call('ZREM', LEASING, HOLDER) end
  return reply('swept', 0)
end

if OPERATION == 'reserve' then return reserve(ARGV[4], bounded(tonumber(ARGV[5])), tonumber(ARGV[6])) end
if OPERATION == 'settle' then return settle(ARGV[4], bounded(tonumber(ARGV[5])), ARGV[6] == '1') end
if OPERATION == 'renew' then return renew(tonumber(ARGV[4])) end
return sweep()
