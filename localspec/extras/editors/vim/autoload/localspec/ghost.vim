" The suggestion at the cursor: asked for when typing pauses, shown, accepted, dropped by the next key.

let s:ghost = {}      " what is shown: a place, `choices` of texts, and `at`, the one of them
let s:request = {}    " the one that runs, and for which place
let s:asked = {}
let s:timer = 0       " until it is asked
let s:warming = {}    " the request that reads ahead
let s:quiet = 0       " the timer until then
let s:announced = {}  " the place that was read ahead last
let s:typing = 0      " whether anything was typed since the editor was started

" A key was typed, or the cursor has moved, in Insert mode.
function! localspec#ghost#typed() abort
  if !s:wanted()
    return localspec#ghost#stop()
  endif
  let place = s:place()
  if s:same(place, s:ghost) || empty(s:ghost) && s:same(place, s:asked)
    return
  endif
  if get(s:warming, 'quiet')
    call localspec#http#cancel(s:warming)
    let s:warming = {}
  endif
  if s:goes_on(place)
    call s:show()
    return
  endif
  call localspec#ghost#stop()
  let s:typing = 1
  let s:asked = place
  let s:timer = timer_start(get(g:, 'localspec_debounce', 60), {_ -> localspec#guarded(function('s:ask'))})
endfunction

" Nothing is wanted any more: the connection of a request that runs is closed.
function! localspec#ghost#stop() abort
  call timer_stop(s:timer)
  if !empty(s:request)
    call localspec#http#cancel(s:request)
    call localspec#note('')
  endif
  let [s:request, s:asked] = [{}, {}]
  call s:hide()
endfunction

" What is shown, as text; '' where nothing is.
function! localspec#ghost#text() abort
  return empty(s:ghost) ? '' : s:ghost.choices[s:ghost.at]
endfunction

" Not in a macro, nor while one is recorded: what its keys do must not hang on what is suggested. Not
" beyond a line's end either, where 'virtualedit' lets the cursor go.
function! s:wanted() abort
  return s:suits() && !&paste && mode() =~# '^i' && !pumvisible()
        \ && empty(reg_executing() .. reg_recording()) && !getcurpos()[3]
endfunction

" Whether suggestions are on in this buffer.
function! s:suits() abort
  return get(g:, 'localspec_enabled', 1) && &buftype ==# '' && &modifiable
        \ && get(get(g:, 'localspec_filetypes', {}), &filetype, 1)
endfunction

" Where the cursor is, and between what.
function! s:place() abort
  let line = getline('.')
  let column = min([col('.') - 1, strlen(line)])
  return {'buffer': bufnr(), 'lnum': line('.'), 'before': strpart(line, 0, column), 'after': strpart(line, column)}
endfunction

function! s:same(one, other) abort
  return !empty(a:other) && a:one.buffer == a:other.buffer && a:one.lnum == a:other.lnum
        \ && a:one.before ==# a:other.before && a:one.after ==# a:other.after
endfunction

" Whether what was typed is what was suggested; then the rest still is.
function! s:goes_on(place) abort
  let ghost = s:ghost
  if empty(ghost) || a:place.buffer != ghost.buffer || a:place.after !=# ghost.after
    return 0
  elseif a:place.lnum == ghost.lnum && stridx(a:place.before, ghost.before) == 0
    let typed = strpart(a:place.before, strlen(ghost.before))
  elseif a:place.lnum == ghost.lnum + 1 && getline(ghost.lnum) ==# ghost.before
    let typed = "\n" .. a:place.before
  else
    return 0
  endif
  return s:took(typed, a:place)
endfunction

" `typed` is in the text now, and `place` where the cursor is: whether any choice goes on from there.
function! s:took(typed, place) abort
  let length = strlen(a:typed)
  let choice = localspec#ghost#text()
  let left = filter(copy(s:ghost.choices), {_, each -> strlen(each) > length && strpart(each, 0, length) ==# a:typed})
  let at = index(left, choice)
  if at < 0
    return 0
  endif
  let s:ghost = extend({'choices': map(left, {_, each -> strpart(each, length)}), 'at': at}, a:place)
  return 1
endfunction

" --- asking

function! s:ask() abort
  if !s:wanted() || !s:same(s:place(), s:asked)
    return localspec#ghost#stop()
  endif
  call s:send({})
endfunction

" Ask for a suggestion, or with `drawn`, how, for another one than those that there are.
function! s:send(drawn) abort
  let place = s:place()
  let fields = extend(localspec#context#fields(place.lnum, place.before .. place.after, strlen(place.before)), {
        \ 'stream': v:true, 'n_predict': get(g:, 'localspec_tokens', 64), 't_max_predict_ms': get(g:, 'localspec_patience', 3000),
        \ 'top_k': 40, 'top_p': 0.99, 'samplers': ['top_k', 'top_p', 'infill'], 'localspec': {'kind': 'complete'},
        \ 'response_fields': ['content', 'stop', 'model', 'timings'],
        \ 'stop': place.after =~# '\S' ? ["\n"] : []})
  call extend(fields, localspec#model())
  let got = {'text': '', 'place': place, 'since': reltime(), 'more': !empty(a:drawn)}
  let s:asked = place
  call localspec#note('…')
  let s:request = localspec#http#ask('/infill', extend(fields, a:drawn), function('s:came', [got]), function('s:ended', [got]))
  if !s:request.live
    let s:request = {}
  endif
endfunction

" A piece of the suggestion has come.
function! s:came(got, event) abort
  let piece = get(a:event, 'content', '')
  let a:got.text ..= type(piece) == v:t_string ? substitute(piece, '\r', '', 'g') : ''
  call localspec#named(a:event)
  if !a:got.more
    call s:offer(a:got)
  endif
endfunction

function! s:ended(got, error) abort
  let [s:request, s:asked] = [{}, a:got.place]
  if !empty(a:error)
    return localspec#failed(a:error)
  endif
  call localspec#note(printf('%.0f ms', reltimefloat(reltime(a:got.since)) * 1000))
  call s:offer(a:got)
  call localspec#ghost#rest()
  if empty(s:ghost)
    call localspec#next#changed()
  endif
endfunction

" Show what has come, where the cursor still is where it was asked for.
function! s:offer(got) abort
  let text = s:fitting(a:got.text, a:got.place)
  if empty(text) || !s:wanted() || !s:same(s:place(), a:got.place)
    return
  elseif a:got.more && !empty(s:ghost)
    if index(s:ghost.choices, text) < 0
      let s:ghost.choices += [text]
      let s:ghost.at = len(s:ghost.choices) - 1
    endif
  else
    let s:ghost = extend({'choices': [text], 'at': 0}, a:got.place)
  endif
  call s:show()
endfunction

" A suggestion without what stands behind the cursor already, and without blanks at its end.
function! s:fitting(text, place) abort
  let text = substitute(a:text, '\_s\+$', '', '')
  let after = trim(a:place.after)
  if !empty(after)
    let text = matchstr(text, '^[^\n]*')
    let over = strlen(text) - strlen(after)
    return over >= 0 && strpart(text, over) ==# after ? strpart(text, 0, over) : text
  endif
  let lines = split(text, "\n", 1)
  let below = getline(a:place.lnum + 1, a:place.lnum + len(lines))
  for number in range(min([len(below), len(lines) - 1]), 1, -1)
    if lines[-number :] ==# below[: number - 1] && join(below[: number - 1], '') =~# '\S'
      let lines = lines[: -number - 1]
      break
    endif
  endfor
  return substitute(join(lines, "\n"), '\_s\+$', '', '')
endfunction

" --- showing

function! s:show() abort
  call localspec#next#stop()
  call localspec#view#draw(s:ghost.buffer, s:ghost.lnum, strlen(s:ghost.before), split(localspec#ghost#text(), "\n", 1))
  call localspec#ghost#map('i', s:defaults, 'localspec#ghost#accept')
endfunction

function! s:hide() abort
  if !empty(s:ghost)
    call localspec#view#erase(s:ghost.buffer)
    let s:ghost = {}
    call localspec#ghost#unmap()
  endif
endfunction

let s:defaults = {'all': '<Tab>', 'line': '<S-Tab>', 'word': '<C-Right>', 'next': '<C-Down>', 'previous': '<C-Up>', 'dismiss': '<C-]>'}

" While something is shown, and only then, some keys of this buffer are ours in a mode: `Function` gets the
" part that a key stands for, and the key.
function! localspec#ghost#map(mode, defaults, Function) abort
  if exists('b:localspec_keys')
    return
  endif
  let b:localspec_keys = []
  for [what, key] in items(extend(copy(a:defaults), filter(copy(get(g:, 'localspec_keys', {})), {part, _ -> has_key(a:defaults, part)})))
    if !empty(key)
      let was = maparg(key, a:mode, 0, 1)
      call add(b:localspec_keys, [a:mode, key, get(was, 'buffer') ? was : {}])
      execute printf('%snoremap <buffer> <silent> %s %s<Cmd>call localspec#guarded(''%s'', ''%s'', ''%s'')<CR>', a:mode, key,
            \ a:mode ==# 'i' && what =~# '^[alw]' ? '<C-g>u' : '', a:Function, what, substitute(key, '<', '<lt>', 'g'))
    endif
  endfor
endfunction

" They are again what they were.
function! localspec#ghost#unmap() abort
  for [mode, key, was] in get(b:, 'localspec_keys', [])
    execute 'silent!' mode .. 'unmap <buffer>' key
    if !empty(was) && exists('*mapset')
      call mapset(mode, 0, was)
    endif
  endfor
  unlet! b:localspec_keys
endfunction

" --- accepting

" A part of what is shown goes into the text: 'all', a 'line' or a 'word'; or 'next' or 'previous' of the
" choices, or 'dismiss'. `key` is the one that was pressed: where nothing is shown any more it is what it was.
function! localspec#ghost#accept(part, key) abort
  if empty(s:ghost) || !s:same(s:place(), s:ghost)
    call localspec#ghost#stop()
    call feedkeys(substitute(a:key, '^<.*', {found -> eval('"\' .. found[0] .. '"')}, ''), 'it')
  elseif a:part ==# 'dismiss'
    let place = s:place()
    call localspec#ghost#stop()
    let s:asked = place
  elseif a:part ==# 'next' || a:part ==# 'previous'
    call s:cycle(a:part ==# 'next' ? 1 : -1)
  else
    call s:insert(matchstr(localspec#ghost#text(), {'all': '^\_.*', 'line': '^\n\?[^\n]*', 'word': '^\_s*\%(\k\+\|[^[:keyword:][:space:]]\+\)'}[a:part]))
  endif
endfunction

function! s:insert(text) abort
  if !empty(s:request)
    call localspec#http#cancel(s:request)
    let s:request = {}
  endif
  let lines = split(a:text, "\n", 1)
  let lines[0] = s:ghost.before .. lines[0]
  let column = strlen(lines[-1])
  let lines[-1] ..= s:ghost.after
  let lnum = s:ghost.lnum
  call setline(lnum, lines[0])
  call append(lnum, lines[1:])
  call cursor(lnum + len(lines) - 1, column + 1)
  if s:took(a:text, s:place())
    call s:show()
  else
    call s:hide()
    call localspec#ghost#typed()
  endif
endfunction

" Another choice; after the last one another is asked for, up to four.
function! s:cycle(step) abort
  let number = len(s:ghost.choices)
  if a:step > 0 && s:ghost.at == number - 1 && number < 4
    if empty(s:request)
      call s:send({'samplers': ['top_k', 'top_p', 'temperature', 'infill'], 'temperature': 0.8, 'seed': number})
    endif
    return
  endif
  let s:ghost.at = (s:ghost.at + a:step + number) % number
  call s:show()
endfunction

" --- reading ahead

" A quiet moment will come: what was visited meanwhile is read by the daemon then, with the text around
" the cursor, so that the next key's request has only that key to read.
" With an argument a buffer was opened or saved, or the cursor rests: the first suggestion here finds its
" prompt read. This starts no daemon, and the next key or anybody's request ends it.
function! localspec#ghost#rest(announced = 0) abort
  call timer_stop(s:quiet)
  let s:quiet = timer_start(a:announced ? 200 : 1000, {_ -> localspec#guarded(function('s:warm'), a:announced)})
endfunction

function! s:warm(announced) abort
  let place = extend(s:place(), {'tick': b:changedtick})
  if !s:suits() || (a:announced ? place == s:announced : !s:typing)
    return
  elseif !empty(s:request) || !empty(s:warming)
    return a:announced ? 0 : localspec#ghost#rest()
  endif
  let taken = localspec#context#take() && s:typing
  if !taken && !a:announced
    return
  endif
  let s:announced = place
  let fields = extend(localspec#context#fields(place.lnum, place.before .. place.after, strlen(place.before)), {
        \ 'n_predict': 0, 'stream': v:true, 'localspec': {'ahead': taken ? v:false : v:true}, 'response_fields': ['']})
  let s:warming = localspec#http#ask('/infill', extend(fields, localspec#model()), {_ -> 0}, {_ -> extend(s:, {'warming': {}})}, taken)
  let s:warming = s:warming.live ? extend(s:warming, {'quiet': !taken}) : {}
endfunction
